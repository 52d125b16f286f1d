"""Metrics by request class."""

from __future__ import annotations

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import RequestClass
from llm_serving.observability.component_metrics import ClassLoad
from llm_serving.observability.metrics import Metrics
from prometheus_client.parser import text_string_to_metric_families

FAST = RequestClass(name="fast", rank=-1, ttft_slo_s=1.0, tpot_slo_s=0.1)
SLOW = RequestClass(name="slow", rank=1)


def scrape(metrics: Metrics) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(value for name, value in sample.labels.items() if name != "model_name")): sample.value
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
    }


def test_class_metrics_count_by_class_of_the_priority() -> None:
    metrics = Metrics("demo", (FAST, SLOW))
    metrics.classes.load = {"fast": ClassLoad(2, 1), "slow": ClassLoad(5, 0)}.__getitem__
    metrics.classes.refused(SLOW, "max_waiting_queue", 3)
    metrics.classes.record_preempted(7)
    metrics.classes.record_first_token(0, 0.3)
    values = scrape(metrics)
    assert values["llm_serving:num_requests_waiting", "slow"] == 5
    assert values["llm_serving:num_requests_running", "fast"] == 1
    assert values["llm_serving:requests_refused_total", "max_waiting_queue", "slow"] == 3
    assert values["llm_serving:requests_refused_total", "fast", "slo"] == 0
    assert values["llm_serving:preemptions_total", "slow"] == 1
    assert values["llm_serving:time_to_first_token_seconds_count", "fast"] == 1


@pytest.mark.parametrize(
    ("reason", "ttft_s", "tpot_s", "e2e_s", "expected"),
    [
        (FinishReason.STOP, 1.0, 0.1, 3.0, {"ttft": True, "tpot": True, "all": True}),
        (FinishReason.LENGTH, 1.1, 0.1, 3.0, {"ttft": False, "tpot": True, "all": False}),
        (FinishReason.LENGTH, 0.1, None, 0.1, {"ttft": True, "all": True}),
        (FinishReason.UNAVAILABLE, None, None, 0.1, {"ttft": False, "tpot": False, "all": False}),
        (FinishReason.ERROR, None, None, 0.1, {"ttft": False, "tpot": False, "all": False}),
        (FinishReason.ERROR, 0.5, 0.1, 0.9, {"ttft": True, "tpot": False, "all": False}),
        (FinishReason.ABORT, None, None, 0.5, {}),
        (FinishReason.ABORT, None, None, 1.5, {"ttft": False, "all": False}),
        (FinishReason.ABORT, 0.5, 0.05, 1.5, {"ttft": True, "tpot": True}),
    ],
)
def test_class_metrics_count_targets_met_and_missed(reason, ttft_s, tpot_s, e2e_s, expected) -> None:
    metrics = Metrics("demo", (FAST, SLOW))
    metrics.classes.record_finished(0, reason, ttft_s, tpot_s, e2e_s)
    values = scrape(metrics)
    counted = {}
    for target in ("ttft", "tpot", "all"):
        for met in ("true", "false"):
            if values[("llm_serving:slo_requests_total", *sorted((target, met, "fast")))]:
                counted[target] = met == "true"
    assert counted == expected


def test_class_without_targets_has_no_target_counters() -> None:
    metrics = Metrics("demo", (FAST, SLOW))
    metrics.classes.record_finished(1, FinishReason.STOP, 9.0, 9.0, 99.0)
    assert not [key for key in scrape(metrics) if "slo_requests" in key[0] and "slow" in key]
