"""From a table of interactions to sequences of tokens."""
