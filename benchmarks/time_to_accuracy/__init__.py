"""Time to accuracy: data, tasks, methods, runs, working file, tables."""
