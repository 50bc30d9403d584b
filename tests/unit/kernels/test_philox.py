"""Philox4x32-10 against the published Random123 vectors."""

import numpy as np
import pytest

from kernels.coupled_sampler.noise import philox4x32, split_seed


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_block_equals_the_published_known_answer(counter, key, expected):
    assert tuple(philox4x32(np.array(counter, dtype=np.uint32), key)) == expected


def test_blocks_of_an_array_of_counters_equal_the_blocks_one_by_one():
    counters = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    together = philox4x32(counters, (1, 2))
    alone = [[philox4x32(counter, (1, 2)) for counter in line] for line in counters]
    np.testing.assert_array_equal(together, alone)


def test_seed_is_split_into_low_and_high_word():
    assert split_seed(0x299F31D0A4093822) == (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seed_outside_64_bits_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be in"):
        split_seed(seed)
