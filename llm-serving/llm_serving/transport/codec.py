"""Converts a step to a list of arrays, and a step's output to a message."""

from __future__ import annotations

from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from llm_serving.core.step import (
    NO_SCORES,
    NO_VECTORS,
    SAMPLING_DTYPES,
    AllowedTokens,
    BlockMove,
    Int32Array,
    ResultToken,
    SamplingInput,
    Scores,
    ScoringInput,
    StateAccess,
    StepInput,
    StepOutput,
    TopTokens,
    no_top_tokens,
)
from llm_serving.errors import ProtocolError
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.transport.messages import StepDone

_NO_ARRAYS = "step", "sampling", "scoring", "allowed_follow"
_STEP_ARRAYS = tuple(name for name in StepInput.__struct_fields__ if name not in _NO_ARRAYS)
_SAMPLING_ARRAYS = tuple(sorted(SAMPLING_DTYPES, key=lambda name: name != "seed"))  # 8-byte numbers first
_SCORING_ARRAYS = ScoringInput.__struct_fields__
_arrays_of_step, _arrays_of_sampling, _arrays_of_scoring = (
    attrgetter(*names) for names in (_STEP_ARRAYS, _SAMPLING_ARRAYS, _SCORING_ARRAYS)
)
_arrays_of_top = attrgetter(*TopTokens.__struct_fields__)
_NUMBER: Final = np.dtype(np.uint64)
_INT32: Final = np.dtype(np.int32)
STEP_TYPES: Final[tuple[np.dtype[Any], ...]] = (
    _NUMBER,
    *(np.dtype(SAMPLING_DTYPES[name]) for name in _SAMPLING_ARRAYS),
    *(_INT32,) * (len(_STEP_ARRAYS) + len(_SCORING_ARRAYS) + 1),
)
"""Types of the arrays of `step_arrays`."""
ALLOWED_TYPES: Final[tuple[np.dtype[Any], ...]] = (_NUMBER, *(_INT32,) * len(AllowedTokens._fields))
"""Types of the arrays of `allowed_arrays`."""
_RESULT_BYTES = len(ResultToken._fields) * 4
_MOVE_BYTES = len(BlockMove._fields) * 4
_STATE_BYTES: Final = len(StateAccess._fields) * 4
_BIAS_BYTES: Final = 8 * 4096
_SAMPLE_BYTES: Final = 4 * len(_SAMPLING_ARRAYS) + 4
"""Bytes that each sample adds to the arrays of a step, without its biases and its sampling history."""


def step_arrays(step: StepInput) -> list[NDArray[Any]]:
    """Return the arrays of a step, of `STEP_TYPES`: its number, sampling parameters, other fields, and the lengths of
    shared history prefixes. A sample's history is the tokens that its penalties count. For a draft token, it ends
    with the draft tokens before it. If the history of a sample starts with the whole history of the previous sample,
    this prefix is sent only once.
    """
    sampling, num_shared = step.sampling, np.zeros(len(step.sampling.temperature), np.int32)
    if len(sampling.history_token_ids):
        histories, num_shared = _drop_shared_prefixes(sampling.history_offsets, sampling.history_token_ids)
        sampling = replace(sampling, history_token_ids=histories)
    arrays: list[NDArray[Any]] = [np.array([step.step], np.uint64)]
    arrays += _arrays_of_sampling(sampling)
    arrays += _arrays_of_step(step)
    arrays += _arrays_of_scoring(step.scoring)
    arrays.append(num_shared)
    return arrays


def step_from_arrays(step: int, arrays: list[NDArray[Any]], allowed_follow: bool = False) -> StepInput:
    """Return the step that `step_arrays` converted. `allowed_follow`: whether a later message brings its allowed
    tokens.
    """
    *given, num_shared = _check_step_number(step, arrays)
    sampling = SamplingInput(**dict(zip(_SAMPLING_ARRAYS, given, strict=False)))
    given = given[len(_SAMPLING_ARRAYS) :]
    if num_shared.any():
        histories = _restore_shared_prefixes(sampling.history_offsets, sampling.history_token_ids, num_shared)
        sampling = replace(sampling, history_token_ids=histories)
    return StepInput(
        step=step,
        sampling=sampling,
        scoring=ScoringInput(*given[len(_STEP_ARRAYS) :]),
        allowed_follow=allowed_follow,
        **dict(zip(_STEP_ARRAYS, given, strict=False)),
    )


def allowed_arrays(step: int, allowed: AllowedTokens) -> list[NDArray[Any]]:
    return [np.array([step], np.uint64), *allowed]


def allowed_from_arrays(step: int, arrays: list[NDArray[Any]]) -> AllowedTokens:
    return AllowedTokens(*_check_step_number(step, arrays))


def _drop_shared_prefixes(offsets: Int32Array, token_ids: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Drop the start of each history that equals the whole previous one. Return histories and dropped lengths."""
    num_shared = np.zeros(len(offsets) - 1, np.int32)
    parts, before = [], token_ids[:0]
    for index, (start, end) in enumerate(pairwise(offsets.tolist())):
        history = token_ids[start:end]
        if 0 < len(before) <= len(history) and np.array_equal(history[: len(before)], before):
            num_shared[index] = len(before)
        parts.append(history[num_shared[index] :])
        before = history
    return np.concatenate(parts), num_shared


def _restore_shared_prefixes(offsets: Int32Array, token_ids: Int32Array, num_shared: Int32Array) -> Int32Array:
    lengths = np.diff(offsets)
    most = np.minimum(lengths, np.concatenate([[0], lengths[:-1]]))
    if num_shared.shape != lengths.shape or (num_shared < 0).any() or (num_shared > most).any():
        raise ProtocolError("a shared history prefix is longer than the histories that share it")
    if int((lengths - num_shared).sum()) != len(token_ids):
        raise ProtocolError(f"{len(token_ids)} history tokens do not match the history lengths")
    histories, num_read, before = np.empty(int(lengths.sum()), np.int32), 0, 0
    for start, length, shared in zip(offsets.tolist(), lengths.tolist(), num_shared.tolist(), strict=False):
        histories[start : start + shared] = histories[before : before + shared]
        histories[start + shared : start + length] = token_ids[num_read : num_read + length - shared]
        num_read, before = num_read + length - shared, start
    return histories


def _check_step_number(step: int, arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    number, *others = arrays
    if number.tolist() != [step]:
        raise ProtocolError(f"expected the arrays of step {step}, got the arrays of step {number.tolist()}")
    return others


def max_step_bytes(
    max_tokens: int, max_rows: int, max_model_len: int, block_size: int, max_draft_tokens: int = 0, num_groups: int = 1
) -> int:
    """Return the size of a buffer for the arrays of any step of a model with `num_groups` groups of layers.

    It covers, for each row, its whole history and a full bias table; for each token, a result and a bit mask; for each
    draft token, a bias table and one history token (the rest is shared); for each block table entry, five copies of KV
    blocks. The kernel allocates pages at the first write, so a generous size costs little.
    """
    max_row_blocks = -(-max_model_len // block_size) * num_groups
    allowed_bytes = MAX_VOCAB_SIZE // 8 + 4
    sample_bytes = _SAMPLE_BYTES + _BIAS_BYTES
    per_row = (2 * 4 + 5 * _MOVE_BYTES) * max_row_blocks + 4 * max_model_len + sample_bytes
    per_row += 2 * 4  # adapter
    per_row += 2 * _RESULT_BYTES + 4 * _STATE_BYTES  # read, stored, and at most two checkpoints of a prompt
    per_token = 4 + _RESULT_BYTES + 3 * 4 + allowed_bytes  # each may be a draft token
    num_bytes = per_token * max_tokens + max_rows * per_row + max_draft_tokens * (4 + sample_bytes + _STATE_BYTES)
    return num_bytes + 64 * (len(STEP_TYPES) + len(ALLOWED_TYPES))


OUTPUT_DTYPES: Final = ("<i4", "<f4", *("<i4", "<i4", "<f4"), "<f4", "<i4", *("<i4", "<i4", "<f4"), "<f4")
"""Types of the arrays of an output: token ids and their log-probabilities, `TopTokens`, log-probabilities and ranks of
`Scores` and their `TopTokens`, vectors."""


def encode_output(output: StepOutput, num_compilations: int = 0) -> StepDone:
    top, scores = output.top, output.scores
    arrays: list[NDArray[Any]] = [output.token_ids, output.logprobs]
    if len(top.token_ids) or scores.top.num_results or len(output.vectors):
        arrays += _arrays_of_top(top)
        arrays += (scores.logprobs, scores.ranks, *_arrays_of_top(scores.top), output.vectors)
    contents = [each.astype(dtype, copy=False).tobytes() for each, dtype in zip(arrays, OUTPUT_DTYPES, strict=False)]
    return StepDone(output.step, tuple(contents), output.row_errors, num_compilations, len(output.vectors))


def decode_output(message: StepDone) -> StepOutput:
    if len(message.arrays) not in (2, len(OUTPUT_DTYPES)):
        raise ProtocolError(f"the reply to step {message.step} has {len(message.arrays)} arrays")
    try:
        token_ids, logprobs, *others = map(np.frombuffer, message.arrays, OUTPUT_DTYPES)
        top, scores, vectors = no_top_tokens(len(token_ids)), NO_SCORES, NO_VECTORS
        if others:
            *of_top, score_logprobs, ranks, offsets, top_ids, top_logprobs, flat = others
            top, scores = TopTokens(*of_top), Scores(score_logprobs, ranks, TopTokens(offsets, top_ids, top_logprobs))
            vectors = flat.reshape(message.num_vectors, -1) if len(flat) else NO_VECTORS
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"the reply to step {message.step} has an array of broken length: {error}") from None
    if not len(token_ids) == len(logprobs) == top.num_results or len(scores.logprobs) != len(scores.ranks):
        raise ProtocolError(f"the reply to step {message.step} has arrays of different lengths")
    if others and not (_is_consistent(top) and _is_consistent(scores.top)):
        raise ProtocolError(f"the reply to step {message.step} has offsets that do not match its top tokens")
    return StepOutput(message.step, token_ids, logprobs, top, message.row_errors, scores, vectors)


def _is_consistent(top: TopTokens) -> bool:
    offsets, count = top.offsets, len(top.token_ids)
    ends = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == count == len(top.logprobs)
    return ends and not (offsets[1:] < offsets[:-1]).any()
