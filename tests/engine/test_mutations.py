"""Each guard against garbled text is necessary; `python tests/tools/mutations.py` lists the faults."""

import pytest
from tools.mutations import MOST_SEEDS, MUTATIONS, NUM_SEEDS, Mutation, Verdict, play


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_guard_catches_the_injected_fault(mutation: Mutation) -> None:
    guarded = play(mutation, guarded=True)
    assert guarded.num_garbled == guarded.num_audited == 0
    if mutation.fault is not None:
        assert guarded.num_lost_steps + guarded.num_broken > 0, "the fault has not happened"
    else:
        assert guarded.num_broken == 0
    # Not what happens with the guard as well: with some, no answer is wrong but the seed ends broken.
    num_seeds = MOST_SEEDS if mutation.fault is None else NUM_SEEDS
    bare = play(mutation, guarded=False, until=lambda so_far: is_missed(guarded, so_far), num_seeds=num_seeds)
    assert is_missed(guarded, bare), "nobody misses the guard"


def is_missed(guarded: Verdict, bare: Verdict) -> bool:
    return bare.num_garbled + bare.num_audited > 0 or (bare.num_broken > 0 and bare != guarded)
