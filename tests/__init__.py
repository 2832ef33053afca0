"""Tests in the rooms of what they test; what they share is in `helpers`."""
