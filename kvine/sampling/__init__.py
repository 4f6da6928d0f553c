"""Sampling: from a row of logits to one token id, the same one whoever else is in the batch."""
