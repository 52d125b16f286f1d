"""Fairness monitors of a single replica, and what an engine leaves out where no other replica serves."""

from __future__ import annotations

import pytest
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.fleet.monitors import WeightMonitor
from llm_serving.kvcache.transfer_pool import TransferPool
from llm_serving.scheduler.tenant_limits import TenantLimiter
from support.engine_harness import Harness
from support.factories import create_classes

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def submit(harness: Harness, count: int, priority: int = 0) -> None:
    for number in range(count):
        harness.engine.submit(Request(f"{priority} {number}", [5, 6], GREEDY, priority=priority, tenant="a"))


def num_violations(harness: Harness) -> dict[str, int]:
    return {name: number for name, number in harness.metrics.num_shares_broken.items() if number}


@pytest.mark.parametrize("limit", [None, 2])
def test_observer_counts_a_request_beyond_its_tenant_limit(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(max_running_per_tenant=limit)
    monkeypatch.setattr(TenantLimiter, "_tenant", lambda self, name: None)  # so the limit is not enforced
    submit(harness, 3)
    harness.run()
    assert num_violations(harness) == ({} if limit is None else {"tenant_limit": 1})


@pytest.mark.parametrize(("priorities", "is_compared"), [([-1], False), ([-1, 0], True)])
def test_observer_compares_class_weights_only_while_classes_compete(
    priorities: list[int], is_compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightMonitor, "count_violations", lambda *_: 1)
    harness = Harness(classes=create_classes(ageing_steps=1), policy="mixed", max_num_seqs=1)
    for priority in priorities:
        submit(harness, 2, priority)
    harness.run()
    assert bool(num_violations(harness)) is is_compared


@pytest.mark.parametrize("num_schedulers", [1, 2])
def test_engine_uses_fleet_accounting_only_with_several_replicas(num_schedulers: int) -> None:
    assert (Harness(num_schedulers=num_schedulers).engine.fleet is not None) == (num_schedulers > 1)


@pytest.mark.parametrize("num_blocks", [0, 8])
def test_engine_migrates_requests_only_with_a_transfer_pool(num_blocks: int) -> None:
    assert (Harness(exports=TransferPool(num_blocks)).engine.migration is not None) == (num_blocks > 0)
