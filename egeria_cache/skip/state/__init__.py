"""Whether the frozen front is what it was, and what a dry run must leave as it was."""
