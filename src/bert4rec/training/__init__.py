"""How a model learns: batches, losses, the loop, checkpoints."""
