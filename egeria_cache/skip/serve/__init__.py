"""From a call of the model to its answer: what was proved, and the ways through the model."""
