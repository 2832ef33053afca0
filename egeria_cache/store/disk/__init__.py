"""The files of a cache directory: whose they are, what they may take, and what they hold."""
