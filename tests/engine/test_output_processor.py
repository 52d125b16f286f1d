"""The output processor: from sampled tokens to outputs."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from llm_serving.core.request import FinishReason, RequestStatus
from llm_serving.core.request_output import TokenLogprobs
from llm_serving.core.step import StepOutput
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from support.factories import create_request
from support.step_factories import top_tokens
from support.word_tokenizer import WordTokenizer


def step_output(*token_ids, num_top=None):
    """Return an output in which sample s is `token_ids[s]` with `num_top[s]` alternatives 10 s, 10 s + 1, ..."""
    counts = num_top or [0] * len(token_ids)
    top = top_tokens(
        [
            ([10 * sample + rank for rank in range(count)], [-1.0 - rank for rank in range(count)])
            for sample, count in enumerate(counts)
        ]
    )
    chosen = -0.5 - np.arange(len(token_ids), dtype=np.float32)
    return StepOutput(0, np.array(token_ids, np.int32), chosen, top)


@pytest.fixture
def processor():
    ticks = count()
    return OutputProcessor(WordTokenizer(), Metrics(), EventLog(), lambda: float(next(ticks)))


def start(processor, **fields):
    request = create_request(**fields)
    processor.start(request)
    return request


def take(processor, request, token_id, reason=None, **output):
    """Return the output of a token, with which the request finishes if a `reason` is given."""
    request.output_token_ids.append(token_id)
    if reason is not None:
        end(request, reason)
    piece = processor.add_token(request, 0, step_output(token_id, **output), 0)
    if reason is not None:
        processor.complete(request, piece)
    return piece


def end(request, reason):
    request.status, request.finish_reason = RequestStatus.FINISHED, reason


def test_output_processor_returns_the_output_of_each_token(processor):
    request = start(processor, num_prompt_tokens=3, request_id="r")
    take(processor, request, 5)
    piece = take(processor, request, 6)
    assert (piece.request_id, piece.text, piece.token_ids, piece.logprobs) == ("r", "6 ", (6,), ())
    assert (piece.num_prompt_tokens, piece.num_output_tokens, piece.finish_reason) == (3, 2, None)
    piece = take(processor, request, 7, FinishReason.LENGTH)
    assert (piece.text, piece.token_ids) == ("7 ", (7,))
    assert (piece.num_output_tokens, piece.finish_reason) == (3, FinishReason.LENGTH)


def test_output_processor_assigns_logprobs_by_sample(processor):
    requests = [start(processor, logprobs=number) for number in (2, 0, None)]
    output = step_output(5, 6, 7, num_top=[2, 0, 0])
    for sample, request in enumerate(requests):
        request.output_token_ids.append(5 + sample)
    assert [processor.add_token(request, sample, output, 0).logprobs for sample, request in enumerate(requests)] == [
        (TokenLogprobs(5, -0.5, (0, 1), (-1.0, -2.0)),),
        (TokenLogprobs(6, -1.5, (), ()),),
        (),
    ]


def test_output_processor_sends_a_stop_token_without_text(processor):
    request = start(processor, stop_token_ids=frozenset({2}))
    take(processor, request, 5)
    piece = take(processor, request, 2, FinishReason.STOP)
    assert (piece.text, piece.token_ids, piece.num_output_tokens) == ("", (2,), 2)


def test_output_processor_keeps_the_text_of_the_last_token_at_the_limit(processor):
    request = start(processor, stop_token_ids=frozenset({2}))
    assert take(processor, request, 5, FinishReason.LENGTH).text == "5 "


def test_output_processor_reports_and_removes_a_stop_string(processor):
    request = start(processor, stop=("6 7",))
    pieces = [take(processor, request, token_id) for token_id in (5, 6, 7)]
    end(request, FinishReason.STOP)
    assert [piece.stop_reason for piece in pieces] == [None, None, "6 7"]
    processor.complete(request, pieces[-1])
    assert [(piece.text, piece.token_ids) for piece in pieces] == [("5 ", (5,)), ("", (6,)), ("", (7,))]


def test_output_processor_flushes_held_text_with_the_last_output(processor):
    request = start(processor, stop=("6 7",))
    assert take(processor, request, 6).text == ""
    end(request, FinishReason.ABORT)
    assert processor.pop_output(request).text == "6 "


def test_output_processor_sends_an_error_with_the_last_output(processor):
    request = start(processor)
    take(processor, request, 5)
    end(request, FinishReason.ERROR)
    piece = processor.pop_output(request, "the WorkAgent is gone")
    assert (piece.text, piece.token_ids) == ("", ())
    assert (piece.finish_reason, piece.error) == (FinishReason.ERROR, "the WorkAgent is gone")


def test_output_processor_knows_a_request_until_its_last_output(processor):
    request, other = start(processor, request_id="r"), start(processor)
    take(processor, request, 5)
    assert processor.knows(request)
    assert processor.find("r") is request
    assert processor.unfinished() == [request, other]
    end(request, FinishReason.ABORT)
    processor.pop_output(request)
    assert not processor.knows(request)
    assert processor.find("r") is None
    assert processor.unfinished() == [other]


def test_output_reports_the_time_from_arrival_to_first_step(processor):
    request = start(processor, arrival_time=10.0)
    assert processor.pop_output(request).queued_s == 0.0
    request.first_scheduled_time = 12.5
    assert processor.pop_output(request).queued_s == 2.5


def test_output_processor_records_the_phases_of_a_request():
    ticks, metrics = count(), Metrics()
    processor = OutputProcessor(WordTokenizer(), metrics, EventLog(), lambda: float(next(ticks)))
    request = start(processor, num_prompt_tokens=3, arrival_time=-10.0)
    request.first_scheduled_time = -4.0
    for token_id in (5, 6):  # at 0 and 1
        take(processor, request, token_id)
        processor.flush_token_gaps()
    take(processor, request, 7, FinishReason.LENGTH)  # at 2
    samples = {sample.name: sample.value for metric in metrics.collect() for sample in metric.samples}
    seconds = [
        samples[f"vllm:request_{phase}_time_seconds_sum"] for phase in ("queue", "prefill", "decode", "inference")
    ]
    assert seconds == [6.0, 4.0, 2.0, 6.0]
    assert (samples["vllm:request_prompt_tokens_sum"], samples["vllm:request_generation_tokens_sum"]) == (3, 3)


def test_request_without_detokenization_gets_tokens_only(processor):
    request = start(processor, detokenize=False)
    pieces = [take(processor, request, 5), take(processor, request, 6, FinishReason.LENGTH)]
    assert [(piece.text, piece.token_ids) for piece in pieces] == [("", (5,)), ("", (6,))]
    assert processor.text_of(request, [5, 6]) == ""
