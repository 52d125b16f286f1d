from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.workload import Workload, WorkloadRequest, WorkloadStream
from support.simulator_workloads import config_with, create_profile

PREFIX = [7] * 64


def create() -> Workload:
    """Return one client alone, for the first measurement; then few requests at a time."""
    rng = random.Random(0)

    def asked(name: str, due_s: float) -> WorkloadRequest:
        prompt = [*(PREFIX if rng.random() < 0.5 else ()), *(rng.randrange(3, 90) for _ in range(rng.randint(1, 40)))]
        length = rng.randint(8, 20)
        return WorkloadRequest(
            name, due_s, prompt, length, length, tenant=rng.choice("ab"), class_name=rng.choice(CLASSES)
        )

    first = WorkloadStream("first", [asked("first", 0.0) for _ in range(10)], concurrency=1)
    return Workload(
        "few", (first, WorkloadStream("then", [asked("then", 3.0 + 0.05 * number) for number in range(60)])), 0, 100
    )


CLASSES = ("interactive", "batch", None)


def num_calls(num_replicas: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of function calls from the first measurement to the last answer."""
    count, counts = 0, False

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    def begins(outcomes: Any, now: float) -> bool:
        nonlocal counts
        if now > 3.0 and not counts:
            counts = True
            sys.setprofile(called)
        return False

    simulation = Simulation(config_with(cluster_config__replicas=num_replicas), create(), create_profile())
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_check_end", lambda self: sys.setprofile(None))  # it checks each replica once
        result = simulation.run(begins)
    assert all(each.ok for each in result.outcomes)
    return count


def test_simulation_calls_per_step_are_independent_of_the_number_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (num_calls(number, monkeypatch) for number in (20, 200))
    assert few > 10_000
    assert many < 1.05 * few


def test_replicas_share_the_output_lengths_of_requests() -> None:
    simulation = Simulation(config_with(cluster_config__replicas=2), create(), create_profile())
    first, second = (vars(replica.agent) for replica in simulation._replicas)
    for name in ("_num_prompt", "_num_output", "_end_positions"):
        assert len(first[name]) == 70
        assert first[name] is second[name]
