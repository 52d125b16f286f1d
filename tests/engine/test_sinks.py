"""Output sinks: another kind of answer is one sink class and one line of `OUTPUT_SINKS`."""

from __future__ import annotations

import gc

import pytest
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.engine.sinks import OUTPUT_SINKS, SequenceSink, SinkContext
from llm_serving.executor.executor import StepFailedError
from msgspec.structs import replace
from support.engine_harness import Harness
from support.factories import create_request
from support.fake_runner import expected_output


class Form:
    """A kind of answer that only `OUTPUT_SINKS` lists."""


class Noting(SequenceSink):
    """A sequence sink that records its calls."""

    def __init__(self, request: Request, context: SinkContext) -> None:
        super().__init__(request, context)
        self.noted: list[object] = []

    def add_tokens(self, request: Request, samples: range, output: StepOutput) -> None:
        self.noted += output.token_ids[samples.start : samples.stop].tolist()
        super().add_tokens(request, samples, output)

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.noted.append((reason, error))
        super().finish(reason, error)

    def set_priority(self, priority: int) -> bool:
        self.noted.append(priority)
        return super().set_priority(priority)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setitem(OUTPUT_SINKS, Form, Noting)
    return Harness()


def submit(harness: Harness) -> tuple[Request, list[object]]:
    """Submit a request with the recording sink, and run a step; return it with the recorded calls."""
    request = create_request(4, max_tokens=5, request_id="r")
    request.beam_search = Form()  # type: ignore[assignment]
    harness.engine.submit(request)
    harness.engine.step()
    assert isinstance(request.sink, Noting)
    return request, request.sink.noted


def test_output_sinks_table_selects_the_sink(harness: Harness) -> None:
    request, noted = submit(harness)
    other = create_request(6, max_tokens=3, request_id="other")
    harness.engine.submit(other)
    harness.run()
    assert noted == expected_output(request.prompt_token_ids, 5) == harness.token_ids("r")
    assert harness.token_ids("other") == expected_output(other.prompt_token_ids, 3)


def test_output_sink_gets_a_priority_change(harness: Harness) -> None:
    request, noted = submit(harness)
    assert harness.engine.set_priority("r", 1)
    assert (noted[-1], request.priority) == (1, 1)
    assert not harness.engine.set_priority("nobody", 1)


def test_output_sink_gets_an_abort(harness: Harness) -> None:
    _, noted = submit(harness)
    harness.engine.abort("r")
    harness.run()
    assert noted[-1] == (FinishReason.ABORT, None)
    assert harness.last("r").finish_reason is FinishReason.ABORT


def test_output_sink_gets_a_row_error(harness: Harness) -> None:
    execute = harness.runner.execute
    harness.runner.execute = lambda step: replace(execute(step), row_errors={0: "no number"})  # type: ignore[method-assign]
    _, noted = submit(harness)
    harness.run()
    assert noted == [(FinishReason.ERROR, "no number")]
    assert harness.last("r").error == "no number"


def test_output_sink_gets_a_step_failure(harness: Harness) -> None:
    def fail(step: StepInput) -> StepOutput:
        raise StepFailedError("bad luck")

    _, noted = submit(harness)
    harness.runner.execute = fail  # type: ignore[method-assign]
    harness.run()
    assert noted[-1] == (FinishReason.ERROR, "StepFailedError: bad luck")
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


@pytest.mark.parametrize("width", [None, 3])
def test_finished_request_leaves_no_reference_cycle(width: int | None) -> None:
    """Garbage collections are rare, and reference cycles of many requests would use much memory until then."""
    harness = Harness(max_num_seqs=8)

    def ask(number: int) -> None:
        request = create_request(5, max_tokens=4, request_id=f"r{number}")
        request.beam_search = None if width is None else BeamSearchParams(width=width, num_returned=width)
        harness.engine.submit(request)
        harness.run()

    ask(0)  # the first fills caches
    gc.collect()
    gc.disable()
    try:
        for number in range(1, 6):
            ask(number)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = {type(each).__name__ for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert found.isdisjoint({"Request", "OneSequence", "Beams", "Hypothesis", "LikelyTokens", "Step"}), found
