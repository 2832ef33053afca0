"""Training loops made to be served wrongly: `harness.py` runs and judges them."""
