"""A few hundred seeds of the simulation; many more with `python tests/simulation.py --seeds 100000`."""

from simulation import FATES, run_seeds


def test_no_law_is_broken_whatever_goes_wrong() -> None:
    totals = run_seeds(0, 250)
    assert totals.num_restarts > 50
    assert totals.num_preempted > 50
    assert set(totals.faults) == set(FATES)
