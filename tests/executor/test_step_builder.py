"""The arrays of a step, built from a schedule."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from llm_serving.core.enums import PoolingMode
from llm_serving.core.request import FinishReason
from llm_serving.core.step import ResultKind
from llm_serving.executor.step_builder import StepBuilder
from support.factories import create_request, create_scheduler


class Steps:
    """A scheduler and the step builder that builds its schedules."""

    def __init__(self, *requests, **limits):
        self.scheduler = create_scheduler(**limits)
        self.builder = StepBuilder(self.scheduler.blocks)
        self.schedules = []
        for request in requests:
            self.scheduler.add(request)

    def next(self):
        """Build a step without waiting for the reply to the previous one."""
        self.schedules.append(self.scheduler.schedule(0.0))
        return self.builder.build(self.schedules[-1], self.schedules[-1].step)

    def allowed(self):
        """Return the allowed tokens of the samples of the oldest step in flight."""
        offsets, words = self.builder.allowed(self.schedules[0])
        return parts(words, offsets)

    def collect(self, *token_ids):
        """Pass the tokens of the oldest step in flight to the scheduler."""
        self.scheduler.update(self.schedules.pop(0), list(token_ids))


def parts(values, offsets):
    return [values[start:end].tolist() for start, end in pairwise(offsets)]


def histories(step):
    return parts(step.sampling.history_token_ids, step.sampling.history_offsets)


def biases(step):
    sampling = step.sampling
    ids, values = (parts(array, sampling.bias_offsets) for array in (sampling.bias_token_ids, sampling.bias_values))
    return [dict(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]


def test_step_builder_batches_two_prompts():
    step = Steps(create_request(5), create_request(2)).next()
    assert step.step == 0
    assert step.token_ids.tolist() == [100, 101, 102, 103, 104, 100, 101]
    assert step.query_lens.tolist() == [5, 2]
    assert step.num_computed.tolist() == [0, 0]
    assert step.result_tokens[:, 0].tolist() == [0, 1]
    assert step.sampling.position.tolist() == [5, 2]


def test_step_builder_pads_block_tables_with_zeros():
    steps = Steps(create_request(9, request_id="long"), create_request(2, request_id="short"))
    table = steps.next().block_tables
    assert table.shape == (2, 3)
    assert table[0].tolist() == steps.scheduler.blocks.block_table("long")
    assert table[1].tolist() == [*steps.scheduler.blocks.block_table("short"), 0, 0]


def test_step_builder_references_tokens_that_are_still_on_the_device():
    steps = Steps(create_request(3), create_request(4))
    steps.next()
    step = steps.next()
    assert step.token_ids.tolist() == [-1, -2]
    assert step.num_computed.tolist() == [3, 4]
    assert step.sampling.position.tolist() == [4, 5]


def test_token_reference_is_the_sample_index_in_the_previous_step():
    steps = Steps(create_request(6), create_request(4), max_num_batched_tokens=8)
    step = steps.next()
    assert step.query_lens.tolist() == [6, 2]
    assert step.result_tokens[:, 0].tolist() == [0]
    step = steps.next()  # what is left of the second prompt goes first
    assert step.token_ids.tolist() == [102, 103, -1]
    assert step.result_tokens[:, 0].tolist() == [0, 1]
    assert steps.next().token_ids.tolist() == [-2, -1]


def test_step_builder_sends_known_tokens_by_their_ids():
    steps = Steps(create_request(3), create_request(4))
    steps.next()
    steps.collect(11, 12)
    assert steps.next().token_ids.tolist() == [11, 12]


def test_stop_tokens_are_forbidden_below_min_tokens():
    ends = frozenset({9, 2})
    steps = Steps(
        create_request(3, min_tokens=2, stop_token_ids=ends, logit_bias=((5, -1.5),)),
        create_request(3, stop_token_ids=ends),
    )
    forbidden = {2: -math.inf, 9: -math.inf}
    assert biases(steps.next()) == [{5: -1.5, **forbidden}, {}]
    assert biases(steps.next()) == [{5: -1.5, **forbidden}, {}]
    assert biases(steps.next()) == [{5: -1.5}, {}]


def test_history_is_sent_if_penalties_need_it():
    steps = Steps(create_request(2), create_request(3, repetition_penalty=1.5), create_request(2, presence_penalty=1.0))
    step = steps.next()
    assert histories(step) == [[], [100, 101, 102], [100, 101]]
    assert step.sampling.history_offsets.tolist() == [0, 0, 3, 5]
    assert step.sampling.history_prompt_lens.tolist() == [0, 3, 2]


def test_sampling_history_may_end_in_a_reference():
    steps = Steps(create_request(2), create_request(3, frequency_penalty=0.5))
    steps.next()
    assert histories(steps.next()) == [[], [100, 101, 102, -2]]
    steps.collect(11, 12)
    step = steps.next()
    assert histories(step) == [[], [100, 101, 102, 12, -2]]
    assert step.sampling.history_prompt_lens.tolist() == [0, 3]


def test_sampling_parameters_follow_the_order_of_the_samples():
    steps = Steps(
        create_request(
            2, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, typical_p=0.75, seed=2**64 - 1, logprobs=2
        ),
        create_request(2, repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=2.0, logprobs=0),
        create_request(2),
    )
    sampling = steps.next().sampling
    assert sampling.num_samples == 3
    assert sampling.temperature.tolist() == [0.5, 0.0, 0.0]
    assert sampling.top_k.tolist() == [3, 0, 0]
    assert sampling.top_p.tolist() == [0.25, 1.0, 1.0]
    assert sampling.min_p.tolist() == [0.125, 0.0, 0.0]
    assert sampling.typical_p.tolist() == [0.75, 1.0, 1.0]
    assert sampling.seed.tolist() == [2**64 - 1, 0, 0]
    assert sampling.repetition_penalty.tolist() == [1.0, 1.5, 1.0]
    assert sampling.presence_penalty.tolist() == [0.0, -1.0, 0.0]
    assert sampling.frequency_penalty.tolist() == [0.0, 2.0, 0.0]
    assert sampling.num_logprobs.tolist() == [2, 0, -1]


def test_step_arrays_have_the_documented_dtypes():
    step = Steps(create_request(2)).next()
    kinds = {name: getattr(step.sampling, name).dtype.str for name in step.sampling.__slots__}
    floats = {
        "temperature",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    }
    assert {name for name, kind in kinds.items() if kind == "<f4"} == floats | {"bias_values"}
    assert {name for name, kind in kinds.items() if kind == "<u8"} == {"seed"}
    for name in ("token_ids", "query_lens", "num_computed", "block_tables", "result_tokens"):
        assert getattr(step, name).dtype == np.int32


def test_sampling_parameters_change_with_the_sampled_requests():
    first = create_request(2, seed=1, max_tokens=2, presence_penalty=0.5)
    second = create_request(2, seed=2, max_tokens=4, logprobs=3)
    steps = Steps(first, second)
    seen = []
    for tokens in ((7, 7), (7, 7), (7,)):
        sampling = steps.next().sampling
        arrays = (sampling.seed, sampling.num_logprobs, sampling.history_prompt_lens, sampling.presence_penalty)
        history = parts(sampling.history_token_ids, sampling.history_offsets)
        seen.append((*(array.tolist() for array in arrays), history, sampling.position.tolist()))
        steps.collect(*tokens)
    assert seen == [
        ([1, 2], [-1, 3], [2, 0], [0.5, 0.0], [[100, 101], []], [2, 2]),
        ([1, 2], [-1, 3], [2, 0], [0.5, 0.0], [[100, 101, 7], []], [3, 3]),
        ([2], [3], [0], [0.0], [[]], [4]),
    ]


class TestBadWords:
    def test_a_bad_word_of_one_token_is_always_forbidden(self):
        steps = Steps(create_request(3, bad_words=((7,), (9,))))
        assert biases(steps.next()) == [{7: -math.inf, 9: -math.inf}]
        assert biases(steps.next()) == [{7: -math.inf, 9: -math.inf}]

    def test_the_last_token_of_a_bad_word_is_forbidden_after_its_prefix(self):
        steps = Steps(create_request(3, bad_words=((101, 102, 7), (5, 6, 7), (6, 8))))
        seen = []
        for token in (5, 6, 7, 6):
            seen.append(biases(steps.next()))
            assert steps.scheduler.schedule(0.0) is None  # the next step needs to know the token of this one
            steps.collect(token)
        assert seen == [[{}], [{}], [{7: -math.inf, 8: -math.inf}], [{}]]


def test_allowed_tokens_are_sent_as_bitmaps():
    steps = Steps(
        create_request(3, allowed_token_ids=(0, 33, 31)), create_request(3), create_request(3, allowed_token_ids=(4,))
    )
    sampling = steps.next().sampling
    assert sampling.allowed_offsets.tolist() == [0, 2, 2, 3]
    assert sampling.allowed_words.view("<u4").tolist() == [2**31 + 1, 2, 16]
    again = steps.next().sampling
    assert again.allowed_words is sampling.allowed_words


def test_matcher_gives_the_allowed_tokens_of_each_step():
    request = create_request(3)
    request.matcher = _Matcher()
    steps = Steps(create_request(3), request, create_request(3, allowed_token_ids=(4,)))
    assert steps.next().allowed_follow
    assert steps.allowed() == [[], [0], [16]]
    assert steps.next().allowed_follow  # formed ahead
    steps.collect(4, 5, 4)
    assert steps.allowed() == [[], [1, 5], [16]]
    steps.next()
    steps.collect(6, -1, 4)  # no token could be chosen
    assert steps.allowed() == [[], [], [16]]
    steps.scheduler.finish(request, FinishReason.ERROR)
    assert steps.allowed() == [[], [], [16]]
    assert not Steps(create_request(3)).next().allowed_follow


class _Matcher:
    """A matcher that allows tokens that a test can predict."""

    def allowed_words_after_drafts(self, output_token_ids, draft_token_ids):
        outputs = [[*output_token_ids, *draft_token_ids[:count]] for count in range(len(draft_token_ids) + 1)]
        return [np.array([len(each), *each], np.int32) for each in outputs]


def test_matcher_gives_the_allowed_tokens_after_each_draft_token():
    request = create_request(3)
    request.matcher, request.needs_known_output = _Matcher(), True
    steps = Steps(request, create_request(3, allowed_token_ids=(0, 2)), block_size=16)
    steps.next()
    steps.collect(4, 5)
    steps.scheduler.set_draft_tokens(request, [8, 9, 7])
    assert steps.next().allowed_follow
    assert steps.allowed() == [[1, 4], [2, 4, 8], [3, 4, 8, 9], [4, 4, 8, 9, 7], [5]]


def test_a_row_with_draft_tokens_has_a_sample_after_each():
    plain = create_request(3, request_id="plain")
    drafted = create_request(
        4,
        request_id="drafted",
        max_tokens=8,
        min_tokens=3,
        repetition_penalty=1.5,
        bad_words=((8, 9), (1,)),
        stop_token_ids=frozenset({2}),
    )
    steps = Steps(plain, drafted, block_size=16)
    steps.next()
    steps.collect(7, 7)
    steps.scheduler.set_draft_tokens(drafted, [8, 3])
    step = steps.next()
    assert step.token_ids.tolist() == [7, 7, 8, 3]
    assert step.query_lens.tolist() == [1, 3]
    assert step.result_tokens.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 2, 0]]
    assert step.sampling.position.tolist() == [4, 5, 6, 7]
    prompt = [100, 101, 102, 103]
    assert histories(step) == [[], [*prompt, 7], [*prompt, 7, 8], [*prompt, 7, 8, 3]]
    forbidden = -math.inf
    # The end is forbidden for three tokens; the second bad word ends where the first draft is its beginning.
    assert biases(step) == [
        {},
        {2: forbidden, 1: forbidden},
        {2: forbidden, 1: forbidden, 9: forbidden},
        {1: forbidden},
    ]
    steps.collect(7, 8, 4, 5)
    assert steps.next().token_ids.tolist() == [7, 4]


def test_step_builder_names_the_pooled_token():
    def result(pooling):
        request = create_request(5, max_tokens=0)
        request.wants_vector = True
        steps = Steps(request)
        steps.builder = StepBuilder(steps.scheduler.blocks, pooling)
        return steps.next().result_tokens.tolist()

    assert result(PoolingMode.LAST) == [[0, 4, ResultKind.VECTOR]]
    assert result(PoolingMode.FIRST) == [[0, 0, ResultKind.VECTOR]]
    assert result(PoolingMode.MEAN) == [[0, 4, ResultKind.MEAN]]
