"""Attention over the block cache, through exchangeable backends, and the cache-free oracle that checks it."""
