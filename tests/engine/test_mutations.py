"""Each guard against garbled text is necessary; `python tests/tools/mutations.py` lists the faults."""

import pytest
from tools.mutations import MAX_SEEDS, MUTATIONS, NUM_SEEDS, Mutation, Verdict, play


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_guard_catches_the_injected_fault(mutation: Mutation) -> None:
    guarded = play(mutation, guarded=True)
    assert guarded.num_garbled == guarded.num_audited == 0
    if mutation.fault is not None:
        assert guarded.num_lost_steps + guarded.num_broken > 0, "the fault has not happened"
    else:
        assert guarded.num_broken == 0
    num_seeds = MAX_SEEDS if mutation.fault is None else NUM_SEEDS
    unguarded = play(mutation, guarded=False, until=lambda so_far: is_detected(guarded, so_far), num_seeds=num_seeds)
    assert is_detected(guarded, unguarded), "the fault has no effect without the guard"


def is_detected(guarded: Verdict, unguarded: Verdict) -> bool:
    return unguarded.num_garbled + unguarded.num_audited > 0 or (unguarded.num_broken > 0 and unguarded != guarded)
