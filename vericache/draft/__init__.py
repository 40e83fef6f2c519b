"""The draft arena: compressed KV as ragged head pages, an uncompressed tail, and the attention over both."""
