"""Python state: what it holds, copies of it, and whether it has changed."""
