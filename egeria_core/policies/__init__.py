"""Freezing policies."""
