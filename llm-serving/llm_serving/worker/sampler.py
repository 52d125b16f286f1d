"""Sampling: from logits to tokens, each row independent of the others.

The NumPy reference `sampling_reference` and the operator library, which is many times faster, give the same tokens:
both use single IEEE 754 operations and exact sums (`logprobs.token_weights`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.sampling_params import LOGIT_BIAS, RULES, Real
from llm_serving.core.step import SAMPLE_FIELDS, SAMPLING_DTYPES, SamplingInput, StepOutput, no_top_tokens
from llm_serving.errors import KernelError, WorkerError
from llm_serving.kernels import library
from llm_serving.log import get_logger
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.worker import sampling_reference
from llm_serving.worker.logprobs import logprobs_of
from llm_serving.worker.model_inputs import (
    all_in_range,
    all_true,
    all_zero,
    any_true,
    is_partition,
    resolve_token_ids,
    stack_rows,
)
from llm_serving.worker.sampling_reference import SampledTokens, SamplingFailure

logger = get_logger(__name__)

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]

_RESULT_FIELDS = ("token_ids", "failures", "largest", "total_weights", "top_token_ids")


class SampleArgs(ctypes.Structure):
    """Arguments of the operator library's sampler, laid out like the C struct of this name in csrc/sample_args.h."""

    _fields_ = (
        ("num_samples", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        # The fields of `SamplingInput`, in its order.
        # Pointers to bytes are created several times faster than pointers to arrays.
        *[(name, ctypes.c_char_p) for name in SAMPLING_DTYPES],
        ("top_width", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in _RESULT_FIELDS],
    )


class LibrarySampler:
    """Samples with the library of CPU kernels, the same tokens as `sampling_reference.choose_tokens`. The caller must
    have checked the parameters. While `num_logprobs` stays the same, as in decode steps of the same requests, the
    arrays of the results are reused, so the next call overwrites the results.
    """

    def __init__(self) -> None:
        self._arguments = SampleArgs()
        self._num_logprobs: bytes | None = None

    def __call__(self, logits: Float32Array, sampling: SamplingInput, history: Int32Array) -> SampledTokens:
        logits, arguments = np.ascontiguousarray(logits, np.float32), self._arguments
        arguments.num_samples, arguments.vocab_size = logits.shape
        arguments.logits = logits.ctypes.data
        for name, dtype in SAMPLING_DTYPES.items():
            array = history if name == "history_token_ids" else getattr(sampling, name)
            setattr(arguments, name, array.astype(dtype, copy=False).tobytes())
        if (num_logprobs := sampling.num_logprobs.tobytes()) != self._num_logprobs:
            self._num_logprobs, self._choices = num_logprobs, SampledTokens.unset(sampling)
            arguments.top_width = self._choices.top_token_ids.shape[1]
            for name in _RESULT_FIELDS:
                setattr(arguments, name, getattr(self._choices, name).ctypes.data)
        library.done(library.load().llm_sample(ctypes.byref(arguments)))
        return self._choices


ChooseTokens: TypeAlias = Callable[[Float32Array, SamplingInput, Int32Array], SampledTokens]
"""(logits [S, V], checked sampling parameters, their history without references) -> the sampled tokens, which
the next call may overwrite."""


def choose_tokens_for(backend_name: str) -> ChooseTokens:
    """Return a new sampler of the library, or NumPy's function if the library is missing or the backend is `plain`."""
    if backend_name == "plain":
        return sampling_reference.choose_tokens
    try:
        library.load()
    except KernelError as error:
        logger.warning("the operator library is missing, so NumPy samples the tokens, many times slower: %s", error)
        return sampling_reference.choose_tokens
    return LibrarySampler()


_REALS = {name: rule for name in SAMPLE_FIELDS if isinstance(rule := RULES.get(name), Real)}
_REALS_LOW = np.array([[rule.low] for rule in _REALS.values()], np.float32)
_REALS_HIGH = np.array([[rule.high] for rule in _REALS.values()], np.float32)
# `low` if it is excluded, otherwise NaN, which equals no number.
_REALS_EXCLUDED = np.array([[rule.low if rule.above_low else np.nan] for rule in _REALS.values()], np.float32)
_BIAS_HIGH = LOGIT_BIAS.high
# Minima of integer parameters. `seed` is not checked, because every value of its type is valid.
_WHOLE = {"top_k": 0, "position": 0, "num_logprobs": -1, "history_prompt_lens": 0}
_WHOLE_LEAST = np.array([[least] for least in _WHOLE.values()], np.int32)


_arrays_except_position = attrgetter(*[name for name in SAMPLING_DTYPES if name != "position"])


class SamplingCheck:
    """Checks the sampling parameters of each step. A decode step usually repeats the parameters of the previous step,
    except `position`. If it does, and has no token history, no bias and no allowed tokens, only `position` is checked.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._last_valid: list[bytes] = []

    def __call__(self, sampling: SamplingInput) -> None:
        """Check the parameters. Raise WorkerError like `check_sampling`."""
        position = sampling.position
        given: list[bytes] = []
        if not (sampling.history_token_ids.size or sampling.bias_token_ids.size or sampling.allowed_words.size):
            given = [array.tobytes() for array in _arrays_except_position(sampling)]
        if (
            given
            and given == self._last_valid
            and len(position) == sampling.num_samples
            and position.min(initial=0) >= 0
        ):
            return
        check_sampling(sampling, self._vocab_size)
        self._last_valid = given


def check_sampling(sampling: SamplingInput, vocab_size: int) -> None:
    """Check offsets, ids, lengths and ranges before the step is computed. Raise WorkerError for the first error."""
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
    if not all_in_range(biased, vocab_size):
        raise WorkerError(f"bias_token_ids must be from 0 to {vocab_size - 1}. Given: {biased.min()} to {biased.max()}")
    if len(sampling.bias_values) != len(biased):
        raise WorkerError(f"bias_values must have {len(biased)} entries. Given: {len(sampling.bias_values)}")
    if biased.size and not (sampling.bias_values <= _BIAS_HIGH).all():  # minus infinity forbids a token
        raise WorkerError(f"bias_values must be at most {_BIAS_HIGH}. Given: {sampling.bias_values.max()}")
    check_allowed(sampling, vocab_size)
    if num_samples:
        _check_ranges(sampling)


def check_allowed(sampling: SamplingInput, vocab_size: int) -> None:
    offsets, num_words = sampling.allowed_offsets, len(sampling.allowed_words)
    _check_offsets("allowed", offsets, num_words, sampling.num_samples)
    if num_words and (offsets[1:] - offsets[:-1]).max() > -(-vocab_size // 32):
        raise WorkerError(f"allowed_words must have no bits beyond the {vocab_size} tokens")


def _check_offsets(name: str, offsets: Int32Array, num_entries: int, num_samples: int) -> None:
    if not is_partition(offsets, num_entries, num_samples):
        raise WorkerError(
            f"{name}_offsets must divide {num_entries} entries into {num_samples} parts and never decrease. "
            f"Given: {offsets.tolist()[:8]}"
        )


def _check_ranges(sampling: SamplingInput) -> None:
    reals = stack_rows([getattr(sampling, name) for name in _REALS])
    inside = (reals >= _REALS_LOW) & (reals <= _REALS_HIGH) & (reals != _REALS_EXCLUDED)
    if not all_true(inside):
        row, sample = np.argwhere(~inside)[0].tolist()
        name, rule = list(_REALS.items())[row]
        raise WorkerError(f"{name} {rule.text}. Given: {reals[row, sample]}")
    whole = stack_rows([getattr(sampling, name) for name in _WHOLE])
    too_small = whole < _WHOLE_LEAST
    if any_true(too_small):
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
    """Sample one token for each row of `logits` ([S, V], C-contiguous, not changed). Call `check_sampling` before.
    `previous` holds the tokens of the previous step, to which the token histories of samples may refer. If no token of
    a row can be sampled, `row_errors` of the output says why.
    """
    history = resolve_token_ids(sampling.history_token_ids, previous)
    choices = choose_tokens(logits, sampling, history)
    logprobs, top = logprobs_of(
        logits, choices.token_ids, choices.top_token_ids, choices.largest, choices.total_weights
    )
    row_errors = {} if all_zero(choices.failures) else _row_errors(choices)
    return StepOutput(step, choices.token_ids.copy(), logprobs, top, row_errors)


def greedy_samples(sampling: SamplingInput) -> NDArray[np.bool_]:
    """Return which samples take the token with the largest logit, after penalties, bias and allowed tokens."""
    greedy: NDArray[np.bool_] = (sampling.temperature == 0) | (sampling.top_k == 1)
    return greedy


def uses_logits_unchanged(sampling: SamplingInput) -> bool:
    """Return whether no sample has penalties, a bias or allowed tokens, or needs log-probabilities."""
    return (
        not len(sampling.bias_token_ids)
        and not len(sampling.allowed_words)
        and bool((sampling.num_logprobs < 0).all())
        and bool((sampling.repetition_penalty == 1).all())
        and all_zero(sampling.presence_penalty)
        and all_zero(sampling.frequency_penalty)
    )


def output_of_tokens(step: int, token_ids: Int32Array) -> StepOutput:
    return StepOutput(step, token_ids, np.zeros(len(token_ids), np.float32), no_top_tokens(len(token_ids)))


def _row_errors(choices: SampledTokens) -> dict[int, str]:
    row_errors: dict[int, str] = {}
    for row in np.flatnonzero(choices.failures).tolist():
        if choices.failures[row] == SamplingFailure.LOGITS:
            row_errors[row] = f"no token can be sampled: the largest logit is {choices.largest[row]}"
        else:
            row_errors[row] = "penalties, bias and allowed tokens leave no token to sample"
    return row_errors
