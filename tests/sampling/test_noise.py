import numpy as np
import pytest
from sampling_oracle import expected_uniform, philox4x64

from kvine.sampling.noise import fresh_seed, uniform

TOP = 2**64 - 1


def test_the_oracle_is_philox4x64_10() -> None:
    """Known answers published with Random123."""
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox4x64([0] * 4, [0] * 2) == zeros
    assert philox4x64([TOP] * 4, [TOP] * 2) == ones


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, TOP])
@pytest.mark.parametrize("sample_index", [0, 1, 2**40])
@pytest.mark.parametrize("position", [0, 1, 131_072])
def test_uniform_is_keyed_philox(seed: int, sample_index: int, position: int) -> None:
    assert uniform(seed, sample_index, position) == expected_uniform(seed, sample_index, position)


def test_uniform_has_53_bits_below_one_and_no_repeats() -> None:
    keys = [(seed, sample, position) for seed in (0, 1, TOP) for sample in range(4) for position in range(200)]
    values = np.array([uniform(*key) for key in keys])
    assert len(np.unique(values)) == len(keys)
    assert ((values >= 0) & (values < 1)).all()
    scaled = values * 2**53
    assert (scaled == np.floor(scaled)).all()
    assert (scaled % 2 == 1).any()  # the last bit is used


def test_d03_fresh_seeds_are_64_bits_and_differ() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed <= TOP for seed in seeds)
    assert max(seeds) > 2**60
