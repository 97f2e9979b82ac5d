"""Finding the best of very many items: exactly, a block at a time, or by an index."""
