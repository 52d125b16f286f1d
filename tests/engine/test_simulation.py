"""Some seeds of the simulation; many more with `python tests/tools/simulation.py --seeds 100000 --processes 2`."""

import itertools
from unittest.mock import patch

import pytest
from llm_serving.engine import replica
from llm_serving.engine.fleet.accounting import FleetAccounting
from support.simulated_agent import FAULTS
from support.simulated_client import STATES
from support.simulated_network import EVENTS
from tools.simulation import run_seeds

NUM_SEEDS = 200
MAX_SEEDS = 1000
"""Maximum number of seeds until an injected fault must be detected."""
FIRST_SEED_OF_EPOCHS = 259
"""First seed of the search for a reused epoch: the first that has one, after 20 s of other seeds."""
RARE = {"preempted", "swapped", "lost", "in prefill", "waiting for its parent"}
"""States in which a client leaves in less than one seed of a hundred: these seeds may happen to have none."""


def test_simulated_faults_break_no_invariant() -> None:
    totals = run_seeds(0, NUM_SEEDS)
    assert totals.events["seeds"] == NUM_SEEDS
    assert min(totals.events.values()) > 5, f"something hardly happens:\n{totals}"
    assert set(totals.faults) == set(FAULTS)
    assert {"drains with requests", "drains refused", "replicas that left", "replicas loaded again"} <= set(
        totals.events
    )
    assert {*EVENTS, "connections that continued", "connections refused", "starts that failed"} <= set(totals.network)
    assert set(STATES) - RARE <= set(totals.aborts) <= set(STATES)
    assert {"max_waiting_queue", "max_waiting_tokens", "class_max_waiting", "never_fits"} <= set(+totals.refusals)
    assert totals.ends["timeout"] > 10


def test_tenant_slot_is_freed_when_its_request_ends_and_not_when_its_client_disconnects() -> None:
    """The client disconnects during a migration, while the request is in the inbox of the second replica."""
    run_seeds(71_017_825, 1)


def test_simulation_detects_a_drained_replica_that_keeps_its_accounting() -> None:
    with (
        patch.object(FleetAccounting, "leave", lambda accounting, index: None),
        pytest.raises(AssertionError, match="a replica that left still counts"),
    ):
        run_seeds(0, MAX_SEEDS, 3)


def test_simulation_detects_reused_epochs() -> None:
    """The epochs of exported blocks of a replica that is drained and loaded again."""
    with (
        patch.object(replica, "_POOL_NUMBERS", itertools.repeat(0)),
        pytest.raises(AssertionError, match="an epoch of block"),
    ):
        run_seeds(FIRST_SEED_OF_EPOCHS, MAX_SEEDS, 3)
