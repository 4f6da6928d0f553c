"""Noise that belongs to a token, not to a batch or a moment.

Looked up by (seed, sample index, position), so preemption, batch mates and drafts cannot change what a request draws.
"""

import secrets

import numpy as np


def fresh_seed() -> int:
    """A random seed, 0 to 2**64 - 1, for a request that gives none."""
    return secrets.randbits(64)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """The uniform number in [0, 1), with 53 random bits, of one token of one sample.

    Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a keyed function of a
    counter: nothing is stored, each token's number can be computed again at any time.

    Args:
        seed: The request's seed, 0 to 2**64 - 1.
        sample_index: Which of the request's samples, from 0.
        position: How many tokens that sample has generated already.
    """
    key = np.array([seed, sample_index], dtype=np.uint64)
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    return (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53
