"""How good a model is, measured through the same `score()` that serves."""
