"""Where a model may be cut, and the proof that it may: on copies, before anything is stored."""
