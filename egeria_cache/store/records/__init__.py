"""Samples as bytes: their keys, and one record for each."""
