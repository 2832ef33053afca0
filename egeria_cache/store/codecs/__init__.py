"""Numbers of an activation <-> fewer bytes. Pure: no file, no thread, no global state."""
