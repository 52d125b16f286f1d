"""The counter-based random numbers of the reference sampler."""

import numpy as np
import pytest
from llm_serving.worker.sampling_reference import philox4x32, uniform


def words(*values):
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_random_numbers_equal_known_answers_of_random123(counter, key, expected):
    assert tuple(int(word[0]) for word in philox4x32(words(*counter), words(*key))) == expected


def test_random_number_depends_on_seed_and_position_alone():
    seeds = np.array([5, 2**64 - 1, 5, 0], np.uint64)
    positions = np.array([1, 7, 2, 1], np.int32)
    together = uniform(seeds, positions)
    reference = [float(uniform(seeds[i : i + 1], positions[i : i + 1])[0]) for i in range(4)]
    assert together.tolist() == reference
    assert len(set(reference)) == 4


def test_random_numbers_depend_on_the_upper_half_of_a_seed():
    position = np.array([0, 0], np.int32)
    low, high = uniform(np.array([1, 1 + 2**32], np.uint64), position)
    assert low != high


def test_random_numbers_are_uniform_in_the_unit_interval():
    numbers = uniform(np.full(64_000, 3, np.uint64), np.arange(64_000))
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    # 64 bins of 1,000: chi-square with 63 degrees of freedom is below 114 with probability 0.9999.
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    assert ((counts - 1000) ** 2 / 1000).sum() < 114
