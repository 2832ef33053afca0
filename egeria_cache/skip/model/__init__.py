"""The user's modules while they are ours: their calls taken over, their modes held, their names."""
