import msgspec
import numpy as np
import pytest
from llm_serving.core.step import BlockMoveKind, Scores, StepInput, StepOutput, all_tokens_allowed, no_top_tokens
from llm_serving.errors import ProtocolError
from llm_serving.executor.step_builder import StepBuilder
from llm_serving.transport.codec import (
    ALLOWED_TYPES,
    STEP_TYPES,
    allowed_arrays,
    decode_output,
    encode_output,
    max_step_bytes,
    step_arrays,
    step_from_arrays,
)
from llm_serving.transport.messages import StepDone
from llm_serving.transport.shared_memory import InlineArrays
from msgspec.structs import replace
from support.factories import create_request, create_scheduler
from support.step_factories import block_moves, scoring_input, top_tokens


def a_step() -> StepInput:
    scheduler = create_scheduler()
    scheduler.add(create_request(5, temperature=0.5, seed=2**64 - 1, repetition_penalty=1.5, logit_bias=((3, -1.0),)))
    scheduler.add(create_request(3, min_tokens=2, stop_token_ids=frozenset({2})))
    schedule = scheduler.schedule(0.0)
    assert schedule is not None
    return StepBuilder(scheduler.blocks).build(schedule, schedule.step)


def test_step_arrays_round_trip() -> None:
    step = a_step()
    copy = step_from_arrays(step.step, step_arrays(step))
    for owner, other in ((step, copy), (step.sampling, copy.sampling), (step.scoring, copy.scoring)):
        for name in owner.__struct_fields__:
            if name not in ("sampling", "scoring"):
                np.testing.assert_array_equal(getattr(owner, name), getattr(other, name))


def test_step_arrays_round_trip_with_scoring() -> None:
    step = replace(a_step(), scoring=scoring_input(([3, 4], 0), ([], 20)))
    copy = step_from_arrays(step.step, step_arrays(step))
    assert [copy.scoring.num_logprobs.tolist(), copy.scoring.offsets.tolist(), copy.scoring.token_ids.tolist()] == [
        [0, 20],
        [0, 2, 2],
        [3, 4],
    ]


@pytest.mark.parametrize(
    "moves",
    [
        [],
        [
            (BlockMoveKind.SWAP_OUT, 3, 0, 5, 9, 4),
            (BlockMoveKind.COPY, 1, 2, 5, 6, 1),
            (BlockMoveKind.SWAP_IN, 0, 4, 9, 7, 4),
        ],
    ],
)
def test_block_moves_keep_their_order_and_shape(moves) -> None:
    step = replace(a_step(), block_moves=block_moves(*moves))
    copy = step_from_arrays(step.step, step_arrays(step))
    assert copy.block_moves.shape == (len(moves), 6)
    assert copy.block_moves.tolist() == [list(move) for move in moves]


def test_a_step_with_a_missing_array_is_refused() -> None:
    written = InlineArrays(1).write(0, step_arrays(a_step()))
    with pytest.raises(ProtocolError, match=r"a step has \d+ arrays; \d+ arrived"):
        InlineArrays(1).read(0, written.shapes[:-1], STEP_TYPES, written.content)


def test_arrays_of_a_step_have_the_types_by_which_they_are_read() -> None:
    for step in (a_step(), replace(a_step(), scoring=scoring_input(([3, 4], 0)))):
        assert [array.dtype for array in step_arrays(step)] == [*STEP_TYPES]
        assert [array.dtype for array in allowed_arrays(0, all_tokens_allowed(2))] == [*ALLOWED_TYPES]
    sizes = [each.itemsize for each in STEP_TYPES]
    assert sizes == sorted(sizes, reverse=True), "larger elements must come first, because there is no padding"


def test_largest_step_fits_its_buffer() -> None:
    scheduler = create_scheduler(num_blocks=1000, max_num_batched_tokens=64)
    bias = tuple((token_id, 1.0) for token_id in range(1024))
    for _ in range(8):
        scheduler.add(create_request(7, repetition_penalty=1.5, logit_bias=bias))
    schedule = scheduler.schedule(0.0)
    assert schedule is not None
    # 8 rows of 4 blocks: all swapped out, others swapped in, and one copy per row.
    moves = np.zeros((8 * 4 * 2 + 8, 6), np.int32)
    # A score of every token, and of each row a token and a vector.
    result_tokens, scoring = np.zeros((64 + 2 * 8, 3), np.int32), scoring_input(*(([0], 20) for _ in range(64)))
    step = StepBuilder(scheduler.blocks).build(schedule, schedule.step)
    arrays = step_arrays(replace(step, block_moves=moves, result_tokens=result_tokens, scoring=scoring))
    assert sum(-(-array.nbytes // 64) * 64 for array in arrays) <= max_step_bytes(64, 8, 15, 4)


def a_step_of_drafts(num_rows: int, num_draft_tokens: int, num_prompt_tokens: int) -> StepInput:
    """Return a step of decode rows with penalties and biases and this many draft tokens each."""
    scheduler = create_scheduler(
        max_num_seqs=num_rows, num_blocks=400, block_size=64, max_num_batched_tokens=13_000, max_model_len=4000
    )
    bias = tuple((token_id, 1.0) for token_id in range(1024))
    requests = [
        create_request(num_prompt_tokens, repetition_penalty=1.5, logit_bias=bias, max_tokens=50)
        for _ in range(num_rows)
    ]
    builder = StepBuilder(scheduler.blocks)
    for request in requests:
        scheduler.add(request)
    schedule = scheduler.schedule(0.0)
    assert schedule is not None and schedule.num_samples == num_rows
    builder.build(schedule, 0)
    scheduler.update(schedule, [7] * num_rows)
    for request in requests:
        scheduler.set_draft_tokens(request, [8] * num_draft_tokens)
    schedule = scheduler.schedule(0.0)
    assert schedule is not None and schedule.num_samples == num_rows * (num_draft_tokens + 1)
    return builder.build(schedule, 1)


def test_step_shares_the_history_of_a_row_between_its_draft_tokens() -> None:
    step = a_step_of_drafts(num_rows=3, num_draft_tokens=4, num_prompt_tokens=100)
    arrays = step_arrays(step)
    assert sum(each.size for each in arrays if len(each) == 3 * (100 + 1 + 4)) == 3 * 105
    copy = step_from_arrays(1, arrays)
    np.testing.assert_array_equal(copy.sampling.history_token_ids, step.sampling.history_token_ids)
    assert len(copy.sampling.history_token_ids) == 3 * sum(range(101, 106))


@pytest.mark.parametrize(("index", "common"), [(0, 1), (1, 102), (1, -1), (1, 100)])
def test_inconsistent_shared_history_prefixes_are_rejected(index: int, common: int) -> None:
    *arrays, num_common = step_arrays(a_step_of_drafts(num_rows=1, num_draft_tokens=1, num_prompt_tokens=100))
    num_common[index] = common
    with pytest.raises(ProtocolError, match=r"shared history prefix|history tokens do not match"):
        step_from_arrays(1, [*arrays, num_common])


@pytest.mark.parametrize("num_prompt_tokens", [4, 2960])
def test_largest_step_with_draft_tokens_fits_its_buffer(num_prompt_tokens: int) -> None:
    arrays = step_arrays(a_step_of_drafts(num_rows=4, num_draft_tokens=30, num_prompt_tokens=num_prompt_tokens))
    max_model_len, max_tokens = num_prompt_tokens + 50, 4 * 31
    num_bytes = sum(-(-array.nbytes // 64) * 64 for array in arrays)
    assert num_bytes <= max_step_bytes(max_tokens, 4, max_model_len, 64, 4 * 30)


def test_output_round_trips() -> None:
    output = StepOutput(
        5,
        np.array([3, -1], np.int32),
        np.array([-0.5, 0], np.float32),
        top_tokens([([3, 4], [-0.5, -2]), ([], [])]),
        {1: "all logits are NaN"},
        Scores(
            np.array([-1, -2.5], np.float32),
            np.array([1, 9], np.int32),
            top_tokens([([7, 8], [-0.25, -np.inf]), ([], [])]),
        ),
        np.array([[1, 2, 3], [4, 5, 6]], np.float32),
    )
    assert_same(decode_output(encode_output(output)), output)


def test_output_without_scores_and_vectors_round_trips() -> None:
    output = StepOutput(0, np.array([3, 4], np.int32), np.zeros(2, np.float32), no_top_tokens(2))
    assert len(encode_output(output).arrays) == 2
    assert_same(decode_output(encode_output(output)), output)


def assert_same(copy, output) -> None:
    pairs = (copy, output), (copy.top, output.top), (copy.scores, output.scores), (copy.scores.top, output.scores.top)
    for owner, other in pairs:
        for name in owner.__struct_fields__:
            if name not in ("scores", "top"):
                np.testing.assert_array_equal(getattr(owner, name), getattr(other, name))
    assert copy.vectors.shape == output.vectors.shape


BROKEN = b"\1\0\0\0" * 3


def an_output() -> StepOutput:
    top = top_tokens([([7, 8], [-0.25, -1])])
    scores = Scores(np.zeros(1, np.float32), np.zeros(1, np.int32), top)
    return StepOutput(0, np.zeros(1, np.int32), np.zeros(1, np.float32), top, scores=scores)


LOGPROBS, OFFSETS, SCORES, RANKS, OFFSETS_OF_SCORES = 1, 2, 5, 6, 7
"""Indices in `StepDone.arrays`."""


def with_array(index: int, content: bytes) -> StepDone:
    message = encode_output(an_output())
    arrays = [content if number == index else each for number, each in enumerate(message.arrays)]
    return msgspec.structs.replace(message, arrays=tuple(arrays))


@pytest.mark.parametrize("index", [SCORES, RANKS])
def test_scores_of_different_lengths_are_rejected(index) -> None:
    with pytest.raises(ProtocolError, match="the reply to step 0 has arrays of different lengths"):
        decode_output(with_array(index, BROKEN))


@pytest.mark.parametrize("first", [OFFSETS, OFFSETS_OF_SCORES])
@pytest.mark.parametrize("field", [1, 2])
def test_top_tokens_of_different_lengths_are_rejected(field, first) -> None:
    with pytest.raises(ProtocolError, match="the reply to step 0 has offsets that do not match its top tokens"):
        decode_output(with_array(first + field, BROKEN))


@pytest.mark.parametrize("offsets", [(), (1, 2), (0, 3), (0, -1), (0, 3, 2)])
def test_offsets_that_do_not_match_the_top_tokens_are_rejected(offsets) -> None:
    with pytest.raises(ProtocolError, match="the reply to step 0 has offsets that do not match its top tokens"):
        decode_output(with_array(OFFSETS_OF_SCORES, np.array(offsets, "<i4").tobytes()))


def test_top_tokens_for_another_number_of_samples_are_rejected() -> None:
    with pytest.raises(ProtocolError, match="different lengths"):
        decode_output(with_array(OFFSETS, np.array([0, 1, 2], "<i4").tobytes()))


def test_output_arrays_of_different_lengths_are_rejected() -> None:
    with pytest.raises(ProtocolError, match="different lengths"):
        decode_output(with_array(LOGPROBS, b""))


@pytest.mark.parametrize("count", [0, 1, 3, 10, 12])
def test_another_number_of_output_arrays_is_rejected(count) -> None:
    message = encode_output(an_output())
    arrays = (*message.arrays, b"")[:count]
    with pytest.raises(ProtocolError, match=f"the reply to step 0 has {count} arrays"):
        decode_output(msgspec.structs.replace(message, arrays=arrays))


def test_arrays_of_broken_length_are_rejected() -> None:
    with pytest.raises(ProtocolError, match="the reply to step 0 has an array of broken length"):
        decode_output(with_array(RANKS, b"???"))
