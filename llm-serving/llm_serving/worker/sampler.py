"""From logits to tokens, every row for itself.

The same row of logits with the same sampling parameters gives the same token whatever else is in the batch and whoever
computes it: `token_choice` in NumPy, which is the definition, or the operator library through `kernel_choice`.

The choice of tokens by the operator library: the same, bit for bit, as `token_choice`, many times faster.

That holds by construction: single operations are those of IEEE 754 in both, and sums are exact (`token_weights`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.sampling_params import LOGIT_BIAS, RULES, Real
from llm_serving.core.step import SAMPLE_FIELDS, SAMPLING_DTYPES, SamplingInput, StepOutput
from llm_serving.errors import WorkerError
from llm_serving.kernels import library
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.worker import sampling_reference
from llm_serving.worker.logprobs import logprobs_of
from llm_serving.worker.model_inputs import are_below, are_zero, cut, everywhere, resolve_token_ids, rows_of, somewhere
from llm_serving.worker.sampling_reference import Choices, Failure

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]

_RESULT_FIELDS = ("token_ids", "failures", "largest", "total_weights", "top_token_ids")


class SampleArgs(ctypes.Structure):
    """`SampleArgs` of csrc/sample_args.h: the same fields in the same order."""

    _fields_ = (
        ("num_samples", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        # Those of `SamplingInput`, in its order.
        # Pointers to bytes: several times cheaper to make than those to arrays, and a step makes many.
        *[(name, ctypes.c_char_p) for name in SAMPLING_DTYPES],
        ("top_width", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in _RESULT_FIELDS],
    )


def choose_tokens(logits: Float32Array, sampling: SamplingInput, history: Int32Array) -> Choices:
    """Chooses one token for each row; see `token_choice.choose_tokens`.

    Args:
        logits: [S, V]; a copy is made unless they are C-contiguous.
        sampling: Passed `sampler.check_sampling`: the library does not look again.
        history: Its `history_token_ids` with tokens in place of references, all inside the vocabulary.

    Raises:
        KernelError: There is no memory for it.
    """
    choices = Choices.unset(sampling)
    logits = np.ascontiguousarray(logits, np.float32)
    inputs = [
        (history if name == "history_token_ids" else getattr(sampling, name)).astype(dtype, copy=False).tobytes()
        for name, dtype in SAMPLING_DTYPES.items()
    ]
    arguments = SampleArgs(
        *logits.shape,
        logits.ctypes.data,
        *inputs,
        choices.top_token_ids.shape[1],
        *[getattr(choices, name).ctypes.data for name in _RESULT_FIELDS],
    )
    library.done(library.load().llm_sample(ctypes.byref(arguments)))
    return choices


ChooseTokens: TypeAlias = Callable[[Float32Array, SamplingInput, Int32Array], Choices]
"""(logits [S, V], checked sampling, its history without references) -> the choices."""


def choose_tokens_for(backend_name: str) -> ChooseTokens:
    """How to choose beside a backend: with the operator library where it is loaded."""
    return choose_tokens if backend_name == "cpu" else sampling_reference.choose_tokens


_REALS = {name: rule for name in SAMPLE_FIELDS if isinstance(rule := RULES.get(name), Real)}
_REALS_LOW = np.array([[rule.low] for rule in _REALS.values()], np.float32)
_REALS_HIGH = np.array([[rule.high] for rule in _REALS.values()], np.float32)
# Which no number equals where `low` itself is inside.
_REALS_EXCLUDED = np.array([[rule.low if rule.above_low else np.nan] for rule in _REALS.values()], np.float32)
# Whole numbers; the range of `seed` is that of its type.
_BIAS_HIGH = LOGIT_BIAS.high
_WHOLE = {"top_k": 0, "position": 0, "num_logprobs": -1, "history_prompt_lens": 0}
_WHOLE_LEAST = np.array([[least] for least in _WHOLE.values()], np.int32)


def check_sampling(sampling: SamplingInput, vocab_size: int) -> None:
    """Refuses what would reach outside the logits, before anything of the step is computed.

    Raises:
        WorkerError: Offsets do not cut their lists, a token id lies outside the vocabulary, the arrays do not
            describe the same number of samples, or a parameter is outside its range.
    """
    if vocab_size > MAX_VOCAB_SIZE:
        raise WorkerError(f"vocab_size must be at most {MAX_VOCAB_SIZE} to sample. Given: {vocab_size}")
    num_samples = sampling.num_samples
    for name in SAMPLE_FIELDS:
        if len(getattr(sampling, name)) != num_samples:
            raise WorkerError(f"{name} must have {num_samples} entries. Given: {len(getattr(sampling, name))}")
    history, biased = sampling.history_token_ids, sampling.bias_token_ids
    _check_offsets("history", sampling.history_offsets, len(history), num_samples)
    if history.size and history.max() >= vocab_size:
        raise WorkerError(f"history_token_ids must be below {vocab_size}. Given: {history.max()}")
    _check_offsets("bias", sampling.bias_offsets, len(biased), num_samples)
    if not are_below(biased, vocab_size):
        raise WorkerError(f"bias_token_ids must be from 0 to {vocab_size - 1}. Given: {biased.min()} to {biased.max()}")
    if len(sampling.bias_values) != len(biased):
        raise WorkerError(f"bias_values must have {len(biased)} entries. Given: {len(sampling.bias_values)}")
    if biased.size and not (sampling.bias_values <= _BIAS_HIGH).all():  # minus infinity forbids
        raise WorkerError(f"bias_values must be at most {_BIAS_HIGH}. Given: {sampling.bias_values.max()}")
    check_allowed(sampling, vocab_size)
    if num_samples:
        _check_ranges(sampling)


def check_allowed(sampling: SamplingInput, vocab_size: int) -> None:
    """Refuses allowed tokens that are others than those of the logits.

    Raises:
        WorkerError: Offsets do not cut the words, or these are more than the tokens need.
    """
    offsets, num_words = sampling.allowed_offsets, len(sampling.allowed_words)
    _check_offsets("allowed", offsets, num_words, sampling.num_samples)
    if num_words and (offsets[1:] - offsets[:-1]).max() > -(-vocab_size // 32):
        raise WorkerError(f"allowed_words must have a bit for each of {vocab_size} tokens at most")


def _check_offsets(name: str, offsets: Int32Array, num_entries: int, num_samples: int) -> None:
    if not cut(offsets, num_entries, num_samples):
        raise WorkerError(
            f"{name}_offsets must cut {num_entries} entries into {num_samples} parts and never fall. "
            f"Given: {offsets.tolist()[:8]}"
        )


def _check_ranges(sampling: SamplingInput) -> None:
    """Checks the numbers that `SamplingParams` checked at the door, as they arrive."""
    reals = rows_of([getattr(sampling, name) for name in _REALS])
    inside = (reals >= _REALS_LOW) & (reals <= _REALS_HIGH) & (reals != _REALS_EXCLUDED)
    if not everywhere(inside):
        row, sample = np.argwhere(~inside)[0].tolist()
        name, rule = list(_REALS.items())[row]
        raise WorkerError(f"{name} {rule.text}. Given: {reals[row, sample]}")
    whole = rows_of([getattr(sampling, name) for name in _WHOLE])
    too_small = whole < _WHOLE_LEAST
    if somewhere(too_small):
        row, sample = np.argwhere(too_small)[0].tolist()
        name, least = list(_WHOLE.items())[row]
        raise WorkerError(f"{name} must be at least {least}. Given: {whole[row, sample]}")


def sample(
    step: int,
    logits: Float32Array,
    sampling: SamplingInput,
    previous: Int32Array,
    choose_tokens: ChooseTokens = sampling_reference.choose_tokens,
) -> StepOutput:
    """Chooses one token for each row of logits.

    Args:
        step: Number of the step, for the output.
        logits: [S, V] C-contiguous; read only.
        sampling: How to choose; passed `check_sampling`.
        previous: Tokens of the previous step, for histories that end in a reference to it.
        choose_tokens: From `choose_tokens_for`.

    Returns:
        The tokens; rows whose logits allow no choice are in `row_errors`.
    """
    history = resolve_token_ids(sampling.history_token_ids, previous)
    choices = choose_tokens(logits, sampling, history)
    logprobs, top = logprobs_of(
        logits, choices.token_ids, choices.top_token_ids, choices.largest, choices.total_weights
    )
    row_errors = {} if are_zero(choices.failures) else _row_errors(choices)
    return StepOutput(step, choices.token_ids, logprobs, top, row_errors)


def _row_errors(choices: Choices) -> dict[int, str]:
    row_errors: dict[int, str] = {}
    for row in np.flatnonzero(choices.failures).tolist():
        if choices.failures[row] == Failure.LOGITS:
            row_errors[row] = f"the model's logits allow no choice: the largest is {choices.largest[row]}"
        else:
            row_errors[row] = "penalties, bias and allowed tokens leave no token to choose"
    return row_errors
