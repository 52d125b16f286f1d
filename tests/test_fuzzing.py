"""Every fuzzing target reads its corpus and some hundred mutations; longer: `python tests/tools/fuzz.py all`."""

import random

import pytest
from tools.fuzzing import TARGETS, mutated

NUM_INPUTS = {"connections": 150, "frames": 800, "requests": 800, "safetensors": 500, "yaml": 60}


@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_targets_accept_or_refuse_any_bytes(name):
    target, rng = TARGETS[name], random.Random(7)
    for data in target.corpus:
        target.read(data)
    for number in range(NUM_INPUTS[name]):
        data = mutated(rng, target.corpus)
        try:
            target.read(data)
        except Exception as error:
            error.add_note(f"input {number}: {data[:300]!r}")
            raise


def test_fuzzing_mutations_are_repeatable():
    corpus = TARGETS["requests"].corpus
    made = [mutated(random.Random(seed), corpus) for seed in range(50)]
    assert made == [mutated(random.Random(seed), corpus) for seed in range(50)]
    assert len(set(made) - set(corpus)) > 40
