"""The parts of `time_to_accuracy.py`: data, tasks, methods, runs, working file, tables."""
