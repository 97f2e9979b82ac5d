"""From tables of interactions to sequences of tokens, and their splits."""
