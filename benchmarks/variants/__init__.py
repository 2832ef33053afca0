"""Random samples: how long their draws are used."""
