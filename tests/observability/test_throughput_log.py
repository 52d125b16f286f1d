"""The periodic throughput log line."""

from __future__ import annotations

import asyncio

from llm_serving.core.request import FinishReason
from llm_serving.observability import metrics as metrics_module
from llm_serving.observability.metrics import Metrics, log_throughput, throughput


def busy(metrics: Metrics) -> None:
    """Record two prompts of 30 tokens, half of one found in the prefix cache, and three decode steps."""
    metrics.record_load(2, 1, 0.5, 45)
    for _ in range(2):
        metrics.record_first_token(0.1)
    for _ in range(3):
        metrics.record_load(2, 1, 0.5, 2)
        metrics.record_inter_tokens([0.1, 0.1])
    metrics.record_finished(
        FinishReason.STOP, e2e_s=1.0, ttft_s=0.1, num_prompt=60, num_output=2, queued_s=0.0, num_cached=15
    )
    metrics.record_preempted([0])


def test_throughput_has_the_rates_of_the_period():
    metrics = Metrics()
    for _ in range(2):
        before = metrics.totals()
        busy(metrics)
        assert throughput(before, metrics.totals(), 2.0, metrics.load_now()) == (
            "2 running, 1 waiting; prompt 22.5 tok/s, generation 4.0 tok/s; "
            "KV cache 50.0%, prefix hits 25%, 1 preemptions"
        )


def test_throughput_is_none_without_a_step():
    metrics = Metrics()
    busy(metrics)
    before = metrics.totals()
    metrics.record_load(0, 0, 0.0)
    assert throughput(before, metrics.totals(), 1.0, metrics.load_now()) is None


def test_throughput_without_finished_prompt_has_no_hit_rate():
    metrics = Metrics()
    before = metrics.totals()
    metrics.record_load(1, 0, 0.25, 10)
    assert throughput(before, metrics.totals(), 1.0, metrics.load_now()) == (
        "1 running, 0 waiting; prompt 10.0 tok/s, generation 0.0 tok/s; KV cache 25.0%, prefix hits -, 0 preemptions"
    )


def test_throughput_is_logged_until_the_task_is_cancelled(monkeypatch):
    logged: list[str] = []

    async def run() -> None:
        enough = asyncio.Event()

        def hear(text: str, *values: object) -> None:
            logged.append(text % values)
            enough.set()

        monkeypatch.setattr(metrics_module.logger, "info", hear)
        metrics = Metrics()
        task = asyncio.create_task(log_throughput(metrics, asyncio.get_running_loop().time, 0.001))
        await asyncio.sleep(0)  # it reads what was before
        busy(metrics)
        await enough.wait()
        task.cancel()

    asyncio.run(run())
    assert [text.partition(";")[0] for text in logged] == ["2 running, 1 waiting"]
