"""Models, data sets, runs and programs that several tests use."""
