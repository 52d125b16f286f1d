"""The latency breakdown assigns each nanosecond of a request to the right reason."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.step import StepOutput
from llm_serving.core.timings import HttpTimings
from llm_serving.errors import LLMServingError, WorkerDiedError
from llm_serving.executor.executor import LocalExecutor, StepFailedError
from llm_serving.kvcache import BlockManager
from llm_serving.observability.event_log import EventLog, RequestRecord
from llm_serving.observability.latency_breakdown import Part, Span, attribute, explain, nanoseconds, own_rows
from llm_serving.scheduler import PreemptionMode
from support.engine_harness import Harness
from support.factories import create_classes, create_request
from support.fake_runner import FakeRunner


class Clock:
    """A clock that advances by a seeded random amount at every reading."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.now = 1e6 / 3

    def __call__(self) -> float:
        self.now += self._random.choice([1e-7, 1e-3 / 7, 0.3])
        return self.now


class FailingExecutor(LocalExecutor):
    """An executor whose WorkAgent can be restarted; `failure` is the error of the next step."""

    def __init__(self, blocks: BlockManager, max_steps_in_flight: int) -> None:
        self._new_runner = lambda: FakeRunner(blocks.pool.num_blocks, blocks.block_size, blocks.host_pool.num_blocks)
        super().__init__(self._new_runner())
        self.max_steps_in_flight = max_steps_in_flight
        self.failure: LLMServingError | None = None

    def collect(self) -> StepOutput:
        output, failure, self.failure = super().collect(), self.failure, None
        if failure is not None:
            raise failure
        return output

    def restart(self, reason: str) -> None:
        self._runner = self._new_runner()
        self._submitted.clear()
        self.next_step = 0


class TimedHarness(Harness):
    """A harness with an event log, whose clock and failures a test controls."""

    def __init__(self, seed: int = 0, *, num_steps: int = 10000, ahead: bool = True, **arguments) -> None:
        self.clock = Clock(seed)
        super().__init__(event_log=EventLog(1000, num_steps), clock=self.clock, **arguments)
        self.failing = FailingExecutor(self.scheduler.blocks, 2 if ahead else 1)
        self.engine.executor, self.engine._max_steps_in_flight = self.failing, self.failing.max_steps_in_flight
        self.engine._recovery._executor = self.failing

    def submit(self, num_prompt_tokens: int = 4, **arguments) -> None:
        self.engine.submit(create_request(num_prompt_tokens, arrival_time=self.clock(), **arguments))


def record_of(harness: TimedHarness, request_id: str) -> RequestRecord:
    return next(record for record in harness.engine.event_log.records() if record.request_id == request_id)


def spans_of(harness: TimedHarness, request_id: str) -> list[Span]:
    return attribute(record_of(harness, request_id), harness.engine.event_log.snapshot(harness.clock.now))


def parts_of(harness: TimedHarness, request_id: str) -> dict[str, set[str]]:
    """Return the details by part."""
    found: dict[str, set[str]] = {}
    for span in spans_of(harness, request_id):
        found.setdefault(span.part.value, set()).add(span.detail)
    return found


def check_whole(harness: TimedHarness, record: RequestRecord) -> None:
    """Check that the spans have no gaps from arrival to end, and that the parts add up exactly."""
    events = harness.engine.event_log.snapshot(harness.clock.now)
    spans = attribute(record, events)
    assert all(span.start < span.end for span in spans)
    assert all(before.end == after.start for before, after in pairwise(spans))
    http_timings = record.http_timings
    start = record.arrival_time if http_timings is None else http_timings.received_time
    end = events.now if record.ended_time is None else record.ended_time
    if http_timings is not None and record.ended_time is not None:
        end = max(end, events.now if http_timings.response_sent_time is None else http_timings.response_sent_time)
    assert (spans[0].start, spans[-1].end) == (nanoseconds(start), nanoseconds(end))
    bounds = {each.name: each for each in harness.scheduler.bounds}
    explanation = explain(record, events, bounds[record.request_class.name], 0, with_tenant=False)
    assert sum(round(part.ms * 1e6) for part in explanation.parts) == nanoseconds(end) - nanoseconds(start)
    assert explanation.wall_ms == (nanoseconds(end) - nanoseconds(start)) / 1e6


@pytest.mark.parametrize("seed", range(30))
def test_latency_parts_of_every_request_add_up_exactly(seed):
    """Random loads with preemptions, swaps, aborts, lost steps and restarts; also while requests run."""
    choose = random.Random(seed)
    harness = TimedHarness(
        seed,
        num_steps=choose.choice([8, 10000]),
        ahead=choose.random() < 0.7,
        policy=choose.choice(["prefill_first", "decode_first", "mixed"]),
        num_blocks=choose.choice([12, 20, 64]),
        num_swap_blocks=choose.choice([0, 16]),
        preemption_mode=choose.choice(list(PreemptionMode)),
        max_num_batched_tokens=choose.choice([8, 16, 64]),
        max_num_seqs=choose.choice([2, 4, 8]),
        separate=choose.random() < 0.3,
        prefix_caching=choose.random() < 0.5,
        classes=create_classes(ageing_steps=5, low={"max_running_share": 0.5}),
    )
    ids: list[str] = []
    for round_ in range(60):
        if choose.random() < 0.4:
            http_timings = HttpTimings(harness.clock())
            for choice in range(choose.choice([1, 1, 2])):
                request = create_request(
                    choose.randint(1, 24),
                    request_id=f"{round_}-{choice}",
                    priority=choose.randint(-1, 1),
                    arrival_time=harness.clock(),
                    max_tokens=choose.randint(1, 12),
                )
                if choose.random() < 0.2:
                    request.beam_search = BeamSearchParams(width=choose.randint(1, 3))
                request.http_timings = http_timings if choose.random() < 0.8 else None
                harness.engine.submit(request)
                ids.append(request.request_id)
        if ids and choose.random() < 0.05:
            harness.engine.abort(choose.choice(ids))
        if choose.random() < 0.05:
            harness.failing.failure = choose.choice([StepFailedError("it fails"), WorkerDiedError("it died")])
        harness.engine.step()
        if choose.random() < 0.2:
            for record in harness.engine.event_log.records():
                check_whole(harness, record)
    harness.run()
    records = harness.engine.event_log.records()
    assert [record.request_id for record in records] == ids
    for record in records:
        check_whole(harness, record)
        if record.http_timings is not None and record.http_timings.response_sent_time is None:
            record.http_timings.response_sent_time = harness.clock()
    for record in records:
        check_whole(harness, record)
        if record.summary.finish_reason is FinishReason.LENGTH and record.preemptions == ():
            rows = own_rows(record, harness.engine.event_log.snapshot(harness.clock.now))
            assert (
                harness.engine.event_log.snapshot(0.0).kept_since > record.arrival_time or rows[0].part is Part.PREFILL
            )


def test_latency_of_a_single_request_is_computation_only():
    harness = TimedHarness(ahead=False, max_num_batched_tokens=8)
    harness.submit(20, request_id="a", max_tokens=4)
    harness.run()
    spans = [span for span in spans_of(harness, "a") if span.step is not None]
    assert [(span.step, span.part) for span in spans] == [
        (0, Part.PREFILL),
        (1, Part.PREFILL),
        (2, Part.PREFILL),
        (3, Part.DECODE),
        (4, Part.DECODE),
        (5, Part.DECODE),
    ]
    assert set(parts_of(harness, "a")) <= {"inbox", "queued", "prefill", "device", "decode", "sending"}


def test_latency_of_a_beam_search_is_that_of_one_request():
    harness = TimedHarness(ahead=False, max_num_batched_tokens=8)
    request = create_request(20, request_id="a", max_tokens=4, arrival_time=harness.clock())
    request.beam_search = BeamSearchParams(width=3)
    harness.engine.submit(request)
    harness.run()
    (record,) = harness.engine.event_log.records()
    check_whole(harness, record)
    events = harness.engine.event_log.snapshot(harness.clock.now)
    assert [row.part for row in own_rows(record, events)] == 3 * [Part.PREFILL] + 3 * [Part.DECODE]
    explanation = explain(record, events, harness.scheduler.bounds[0], 0, with_tenant=False)
    assert (explanation.id, explanation.finish_reason) == ("a", "length")
    assert (explanation.tokens.prompt, explanation.tokens.output) == (20, 4)
    assert explanation.bounds.decode_gap.met is None


def test_latency_breakdown_names_what_a_request_waits_for():
    harness = TimedHarness(max_num_seqs=1)
    for name, priority in (("running", -1), ("first", -1), ("second", -1), ("behind", 0)):
        harness.submit(request_id=name, priority=priority)
    for _ in range(3):
        harness.engine.step()
    assert parts_of(harness, "first")["queued"] >= {"no free slot"}
    assert parts_of(harness, "second")["queued"] >= {"its own class, earlier (no free slot)"}
    assert parts_of(harness, "behind")["queued"] >= {"class high ahead (no free slot)"}
    harness.run()
    assert parts_of(harness, "behind")["queued"] >= {
        "class high ahead (no free slot)",
        "no free slot, behind class high",
    }


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [
        ("no free block", {"num_blocks": 4}),
        ("token budget of the step used up", {"max_num_batched_tokens": 11, "num_blocks": 64}),
        ("maximum number of prompts in the step", {"max_prefill_seqs": 1, "num_blocks": 64}),
        ("share limit of its class", {"classes": create_classes(normal={"max_running_share": 0.2}), "num_blocks": 64}),
        ("the step only decodes", {"policy": "decode_first", "num_blocks": 64}),
    ],
)
def test_scheduler_reports_why_a_request_waits(reason, arguments):
    harness = TimedHarness(**arguments)
    harness.submit(11, request_id="running")
    harness.engine.step()
    harness.submit(11, request_id="waiting")
    name = "more" if "of the step" in reason or "in the step" in reason else "waiting"
    if name == "more":
        harness.submit(11, request_id=name)
    harness.run()
    details = parts_of(harness, name)["queued"]
    assert any(reason in detail for detail in details), details


def test_missing_slot_is_reported_before_a_missing_token_budget():
    harness = TimedHarness(max_num_seqs=1, max_prefill_seqs=1, max_num_batched_tokens=4, num_blocks=64)
    harness.submit(20, request_id="running")
    harness.engine.step()
    harness.submit(4, request_id="waiting")
    harness.run()
    details = parts_of(harness, "waiting")["queued"]
    assert "no free slot" in details
    assert not any("the step has all" in each for each in details)


@pytest.mark.parametrize(("num_swap_blocks", "way"), [(0, "recompute"), (16, "swap")])
def test_latency_breakdown_names_the_preempting_class_and_recomputation(num_swap_blocks, way):
    mode = PreemptionMode.SWAP if num_swap_blocks else PreemptionMode.RECOMPUTE
    harness = TimedHarness(num_blocks=7, num_swap_blocks=num_swap_blocks, preemption_mode=mode)
    harness.submit(8, request_id="low", priority=1, max_tokens=10)
    for _ in range(4):
        harness.engine.step()
    harness.submit(16, request_id="high", priority=-1, max_tokens=4)
    harness.run()
    parts = parts_of(harness, "low")
    assert parts["preempted"] == {f"by class high, {way}"}
    assert ("computed again" in parts) == (way == "recompute")
    assert "preempted" not in parts_of(harness, "high")


def test_latency_breakdown_counts_steps_with_other_prompts_as_sharing():
    harness = TimedHarness(ahead=False, separate=True)
    harness.submit(request_id="old", max_tokens=6)
    harness.engine.step()
    harness.submit(request_id="new")
    harness.run()
    assert parts_of(harness, "old")["sharing"] == {"others' prompts"}


def test_latency_breakdown_counts_time_without_a_worker_as_restart():
    harness = TimedHarness()
    harness.submit(request_id="a", max_tokens=6)
    for _ in range(3):
        harness.engine.step()
    harness.failing.failure = WorkerDiedError("it died")
    harness.run()
    assert {"restart", "computed again", "decode"} <= parts_of(harness, "a").keys()
    [outage] = harness.engine.event_log.snapshot(0.0).outages
    restarts = [span for span in spans_of(harness, "a") if span.part is Part.RESTART]
    assert sum(span.end - span.start for span in restarts) == nanoseconds(outage.ended) - nanoseconds(outage.began)


def test_latency_after_the_last_token_is_other_choices_and_sending():
    harness = TimedHarness()
    http_timings = HttpTimings(harness.clock())
    for name, max_tokens in (("short", 2), ("long", 6)):
        request = create_request(request_id=name, max_tokens=max_tokens, arrival_time=harness.clock())
        request.http_timings = http_timings
        harness.engine.submit(request)
    harness.run()
    http_timings.response_sent_time = harness.clock()
    last = [span.part for span in spans_of(harness, "short")][-2:]
    assert last == [Part.OTHER_CHOICES, Part.SENDING]
    assert Part.OTHER_CHOICES not in {span.part for span in spans_of(harness, "long")}
    assert spans_of(harness, "short")[-1].end == spans_of(harness, "long")[-1].end


def test_latency_breakdown_reports_evicted_steps_as_not_kept():
    harness = TimedHarness(num_steps=4)
    harness.submit(request_id="a", max_tokens=20)
    harness.run()
    assert list(parts_of(harness, "a"))[:2] == ["not kept", "decode"]
