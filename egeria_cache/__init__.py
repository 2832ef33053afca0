"""Storage-backed activation cache and data loader for networks with a frozen front."""
