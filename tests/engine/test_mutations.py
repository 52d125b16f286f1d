"""Every guard against garbled text is missed when it is gone; `python tests/mutations.py` prints the list."""

import pytest
from mutations import MUTATIONS, Mutation, play


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_guard_catches_the_fault_and_nothing_else_would(mutation: Mutation) -> None:
    guarded = play(mutation, guarded=True)
    assert guarded.num_garbled == guarded.num_audited == 0
    if mutation.fault is not None:
        assert guarded.num_lost_steps + guarded.num_broken > 0, "the fault has not happened"
    else:
        assert guarded.num_broken == 0
    bare = play(mutation, guarded=False)
    assert bare.num_garbled + bare.num_audited + bare.num_broken > 0, "nobody misses the guard"
    assert guarded != bare, "the guard is gone: all is as it is without it"
