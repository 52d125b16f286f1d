"""Steps as lists of arrays, and replies as messages."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import Move, SamplingInput, StepInput, StepOutput
from llm_serving.errors import ProtocolError
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.transport.messages import StepDone

_STEP_ARRAYS = tuple(f.name for f in fields(StepInput) if f.name not in ("step", "sampling"))
_SAMPLING_ARRAYS = tuple(f.name for f in fields(SamplingInput))
_MOVE_BYTES = len(Move._fields) * 4


def step_arrays(step: StepInput) -> list[NDArray[Any]]:
    """All arrays of a step: its number, then the others in the order of its fields."""
    arrays = [np.array([step.step], np.uint64), *(getattr(step, name) for name in _STEP_ARRAYS)]
    return arrays + [getattr(step.sampling, name) for name in _SAMPLING_ARRAYS]


def step_from_arrays(step: int, arrays: list[NDArray[Any]]) -> StepInput:
    """The inverse of `step_arrays`; the arrays are used as they are, not copied.

    Raises:
        ProtocolError: The number of arrays is not that of a step, or they are those of another one.
    """
    expected = 1 + len(_STEP_ARRAYS) + len(_SAMPLING_ARRAYS)
    if len(arrays) != expected:
        raise ProtocolError(f"a step has {expected} arrays; {len(arrays)} arrived")
    number, *arrays = arrays
    if number.tolist() != [step]:
        raise ProtocolError(f"the arrays announced as those of step {step} say they are of step {number.tolist()}")
    split = len(_STEP_ARRAYS)
    sampling = SamplingInput(**dict(zip(_SAMPLING_ARRAYS, arrays[split:], strict=True)))
    return StepInput(step=step, sampling=sampling, **dict(zip(_STEP_ARRAYS, arrays[:split], strict=True)))


def max_step_bytes(max_tokens: int, max_rows: int, max_model_len: int, block_size: int) -> int:
    """Bytes that the arrays of any step fit in: every row with its whole history, a full bias table and a bit
    for each token that may be chosen.

    Block moves: one full batch out, another in, and a copied block a row are at most three for each entry of the block
    tables. There is room for four, as pages of a buffer are taken when first written.
    """
    max_row_blocks = -(-max_model_len // block_size)
    allowed_bytes = MAX_VOCAB_SIZE // 8 + 4
    per_row = (2 * 4 + 4 * _MOVE_BYTES) * max_row_blocks + 4 * max_model_len + 8 * 4096 + allowed_bytes + 64
    return 4 * max_tokens + max_rows * per_row + 64 * (len(_STEP_ARRAYS) + len(_SAMPLING_ARRAYS))


def encode_output(output: StepOutput, num_compilations: int = 0) -> StepDone:
    return StepDone(
        step=output.step,
        token_ids=output.token_ids.astype("<i4", copy=False).tobytes(),
        logprobs=output.logprobs.astype("<f4", copy=False).tobytes(),
        top_token_ids=output.top_token_ids.astype("<i4", copy=False).tobytes(),
        top_logprobs=output.top_logprobs.astype("<f4", copy=False).tobytes(),
        num_top=output.top_token_ids.shape[1],
        row_errors=output.row_errors,
        num_compilations=num_compilations,
    )


def decode_output(message: StepDone) -> StepOutput:
    """The inverse of `encode_output`; the arrays are read-only views of the message's bytes.

    Raises:
        ProtocolError: The lengths do not agree.
    """
    try:
        token_ids = np.frombuffer(message.token_ids, "<i4")
        logprobs = np.frombuffer(message.logprobs, "<f4")
        top_token_ids = np.frombuffer(message.top_token_ids, "<i4")
        top_logprobs = np.frombuffer(message.top_logprobs, "<f4")
    except ValueError as error:
        raise ProtocolError(f"the reply to step {message.step} has an array of broken length: {error}") from None
    count = len(token_ids)
    if (
        len(logprobs) != count
        or len(top_token_ids) != count * message.num_top
        or len(top_logprobs) != len(top_token_ids)
    ):
        raise ProtocolError(f"the reply to step {message.step} has arrays of different lengths")
    shape = (count, message.num_top)
    return StepOutput(
        message.step, token_ids, logprobs, top_token_ids.reshape(shape), top_logprobs.reshape(shape), message.row_errors
    )
