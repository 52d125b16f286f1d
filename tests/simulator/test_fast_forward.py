from __future__ import annotations

import itertools
import random
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec
import pytest
from llm_serving.observability.metrics import Metrics
from llm_serving.recording.snapshot import capture
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving_simulator.fast_forward import FastForwardEngine
from llm_serving_simulator.figures import SimulationResult
from llm_serving_simulator.profile import CostModel, CostTerm
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.workload import Workload, WorkloadRequest, WorkloadStream, repetitive_answer
from support.simulator_workloads import STEP_S, config_with, create_profile

SPECULATION: dict[str, dict[str, Any]] = {
    "as they come": {},
    "one step at a time": {"scheduler_config__async_scheduling": False},
    "one at a time": {"scheduler_config__num_speculative_tokens": 1, "scheduler_config__prompt_lookup_min": 1},
    "many": {},
    "small cache": {"pa_config__num_blocks": 14},
    "two replicas": {"cluster_config__replicas": 2},
    "audits": {"serving_config__audit_every": 3},
}
"""Workloads with some predictable answers."""
CASES: dict[str, dict[str, Any]] = {
    "as they come": {},
    "one step at a time": {"scheduler_config__async_scheduling": False},
    "nothing found": {"scheduler_config__prefix_caching": False, "pa_config__block_size": 32},
    "few slots": {"model_config__decode_batch_size": 3, "scheduler_config__policy": "decode_first"},
    "separate steps": {"scheduler_config__enable_mixed_chunk": False, "scheduler_config__policy": "mixed"},
    "throughput": {"scheduler_config__policy": "throughput", "scheduler_config__order": "shortest"},
    "small cache": {"pa_config__num_blocks": 14},
    "small cache, swapped": {
        "pa_config__num_blocks": 14,
        "pa_config__num_swap_blocks": 20,
        "scheduler_config__preemption_mode": "swap",
    },
    "two replicas": {"cluster_config__replicas": 2},
    "roles": {"cluster_config__replicas": 2, "cluster_config__roles": "[prefill, decode]"},
    "refusals": {"scheduler_config__slo_refusal_factor": 1.0, "scheduler_config__max_waiting_queue": 4},
    "tenants": {"scheduler_config__max_running_per_tenant": 2, "scheduler_config__order": "fair"},
    "audits": {"serving_config__audit_every": 3},
    **{f"drafts, {name}": settings for name, settings in SPECULATION.items()},
}


def create(seed: int, timeout_s: float | None, *, recites: bool) -> Workload:
    """Return requests that arrive and end at random times; some stop early, one client is a closed loop.

    With `recites`, some answers are predictable.
    """
    rng = random.Random(seed)

    def asked(name: str, due_s: float) -> WorkloadRequest:
        length = rng.randint(2, 40)
        prompt = [3 + rng.randrange(4)] * rng.randint(1, 40)
        text = (
            repetitive_answer(rng, prompt, length, rng.choice((0.3, 0.9)), 8, 100)
            if recites and rng.random() < 0.6
            else ()
        )
        most = length + rng.choice((0, 0, 9))
        kind = rng.choice(("interactive", "batch", None))
        tenant = rng.choice("abc")
        return WorkloadRequest(
            name, due_s, prompt, length, most, most == length, None, kind, tenant, timeout_s, "", text
        )

    times = sorted(rng.uniform(0, 1.8) for _ in range(10))
    streams = (
        WorkloadStream("people", [asked("people", each) for each in times]),
        WorkloadStream("client", [asked("client", 0.0) for _ in range(3)], concurrency=1),
    )
    return Workload("any", streams, retries=1, vocab_size=100)


def play(
    load: Workload, settings: dict[str, Any], fast_forward: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, ...]:
    """Return the result, and a hash of the scheduler's state by replica and step that was scheduled in full."""
    known: dict[tuple[int, int, float], bytes] = {}
    order: dict[int, int] = {}
    schedule = Scheduler.schedule

    def noted(self: Scheduler, now: float) -> Any:
        state = msgspec.msgpack.encode(capture(vars(self)), enc_hook=str)
        which = order.setdefault(id(self), len(order))
        known[which, self.num_steps, now] = blake2b(state, digest_size=8).digest()
        return schedule(self, now)

    pieces = (CostTerm("step", STEP_S), CostTerm("tokens", 1e-4), CostTerm("context", 1e-6), CostTerm("sent", 1e-4))
    profile = create_profile(
        step=CostModel((*pieces, CostTerm("read", 1e-3))),
        form=CostModel((CostTerm("rows", 1e-4),)),
        take=CostModel((CostTerm("step", 1e-4),)),
        spread=(0.5, 1.0, 3.0),
        token_s=1e-4,
        client_s=1e-3,
        request_s=1e-3,
        idle_s=1e-3,
        latency_s=1e-5,
        one_interpreter=len(load.streams[0].requests) % 2 == 0,
    )
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule", noted)
        patch.setattr("secrets.token_hex", lambda num_bytes: "")
        patch.setattr("llm_serving.engine.replica._POOL_NUMBERS", itertools.count())
        result: SimulationResult = Simulation(
            config_with(**settings), load, profile, 1, fast_forward=fast_forward
        ).run()
    outcomes = [replace(each, request_class=None) for each in result.outcomes]  # type: ignore[arg-type]
    counts = result.num_steps, result.num_tokens, result.preemptions, result.bound_violations
    drafts = result.num_draft_tokens, result.num_accepted_tokens
    return (outcomes, result.block_use, counts, drafts, result.busy_share), known


@pytest.mark.parametrize("case", CASES)
def test_fast_forwarded_steps_equal_steps_decided_request_by_request(case, monkeypatch):
    num_uniform = num_audited = num_at_once = num_accepted = 0
    differ: list[bool] = []
    step, advance = FastForwardEngine._step, FastForwardEngine.advance

    def counted(self: FastForwardEngine) -> bool:
        nonlocal num_uniform, num_audited
        progressed = step(self)
        num_uniform += progressed
        num_audited += progressed and not self._all_counted
        return progressed

    def noted(self: FastForwardEngine) -> int:
        nonlocal num_at_once
        num_steps = advance(self)
        num_at_once = max(num_at_once, num_steps)
        return num_steps

    monkeypatch.setattr(FastForwardEngine, "_step", counted)
    monkeypatch.setattr(FastForwardEngine, "advance", noted)
    monkeypatch.setattr(Metrics, "record_audit", lambda self, *, differs: differ.append(differs))
    if case == "drafts, many":  # already three requests count as many
        monkeypatch.setattr("llm_serving.speculation.controller.MIN_CHECKED", 3)
    for seed, timeout_s in enumerate((None, 0.7)):
        load = create(10 * seed + len(case), timeout_s, recites=case.startswith("drafts"))
        one_by_one, all_known = play(load, CASES[case], False, monkeypatch)
        before = num_uniform
        at_once, known = play(load, CASES[case], True, monkeypatch)
        assert at_once == one_by_one
        assert known.items() <= all_known.items()
        assert len(known) == len(all_known) - (num_uniform - before)
        num_accepted += at_once[3][1]
    assert num_uniform > 20 or case == "roles"
    assert not any(differ)
    assert (num_audited > 20 and len(differ) > 2) == case.endswith("audits")
    assert num_at_once > 5 or "cluster_config__replicas" in CASES[case]
    assert (num_accepted > 5) == case.startswith("drafts")
