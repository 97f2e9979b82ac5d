"""An index of the item embeddings: the best of very many items without scoring all of them."""
