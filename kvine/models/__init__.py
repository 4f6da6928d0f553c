"""The model: one decoder for every supported architecture, driven by its config, and its loading.

It computes hidden states and logits from token ids and is handed attention as a function; it holds no cache.
"""
