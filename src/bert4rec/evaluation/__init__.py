"""How good a model is, measured by the same scores that are served."""
