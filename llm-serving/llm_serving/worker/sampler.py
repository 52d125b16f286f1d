"""From logits to tokens, every row for itself.

The same row of logits with the same sampling parameters gives the same token whatever else is in the batch and whoever
computes it: `token_choice` in NumPy, which is the definition, or the operator library through `kernel_choice`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.parameter_rules import Real
from llm_serving.core.sampling_params import LOGIT_BIAS, RULES
from llm_serving.core.step import SAMPLE_FIELDS, SamplingInput, StepOutput
from llm_serving.errors import WorkerError
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.worker import kernel_choice, token_choice
from llm_serving.worker.logprobs import logprobs_of
from llm_serving.worker.model_inputs import resolve_token_ids
from llm_serving.worker.token_choice import Choices, Failure

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]

ChooseTokens: TypeAlias = Callable[[Float32Array, SamplingInput, Int32Array], Choices]
"""(logits [S, V], checked sampling, its history without references) -> the choices."""


def choose_tokens_for(backend_name: str) -> ChooseTokens:
    """How to choose beside a backend: with the operator library where it is loaded."""
    return kernel_choice.choose_tokens if backend_name == "cpu" else token_choice.choose_tokens


_REALS = {name: rule for name in SAMPLE_FIELDS if isinstance(rule := RULES.get(name), Real)}
_REALS_LOW = np.array([[rule.low] for rule in _REALS.values()], np.float32)
_REALS_HIGH = np.array([[rule.high] for rule in _REALS.values()], np.float32)
_REALS_LOW_OUTSIDE = np.array([[rule.above_low] for rule in _REALS.values()])
# Whole numbers; the range of `seed` is that of its type.
_BIAS_HIGH = LOGIT_BIAS.high
_LEAST = {"top_k": 0, "position": 0, "num_logprobs": -1, "history_prompt_lens": 0}


def check_sampling(sampling: SamplingInput, vocab_size: int) -> None:
    """Refuses what would reach outside the logits, before anything of the step is computed.

    Raises:
        WorkerError: Offsets do not cut their lists, a token id lies outside the vocabulary, the arrays do not
            describe the same number of samples, or a parameter is outside its range.
    """
    if vocab_size > MAX_VOCAB_SIZE:
        raise WorkerError(f"vocab_size must be at most {MAX_VOCAB_SIZE} to sample. Given: {vocab_size}")
    for name in SAMPLE_FIELDS:
        if len(getattr(sampling, name)) != sampling.num_samples:
            raise WorkerError(f"{name} must have {sampling.num_samples} entries. Given: {len(getattr(sampling, name))}")
    for name, offsets, token_ids in (
        ("history", sampling.history_offsets, sampling.history_token_ids),
        ("bias", sampling.bias_offsets, sampling.bias_token_ids),
    ):
        if len(offsets) != sampling.num_samples + 1 or offsets[0] != 0 or offsets[-1] != len(token_ids):
            raise WorkerError(
                f"{name}_offsets must cut {len(token_ids)} ids into {sampling.num_samples} parts. "
                f"Given: {offsets.tolist()[:8]}"
            )
        if (offsets[1:] < offsets[:-1]).any() or (token_ids.size and token_ids.max() >= vocab_size):
            raise WorkerError(f"{name}_offsets must not fall and {name}_token_ids must be below {vocab_size}")
    check_allowed(sampling, vocab_size)
    if len(sampling.bias_values) != len(sampling.bias_token_ids):
        raise WorkerError(
            f"bias_values must have {len(sampling.bias_token_ids)} entries. Given: {len(sampling.bias_values)}"
        )
    if sampling.bias_token_ids.size and sampling.bias_token_ids.min() < 0:
        raise WorkerError(f"bias_token_ids must be at least 0. Given: {sampling.bias_token_ids.min()}")
    if not (sampling.bias_values <= _BIAS_HIGH).all():  # minus infinity forbids
        raise WorkerError(f"bias_values must be at most {_BIAS_HIGH}. Given: {sampling.bias_values.max()}")
    _check_ranges(sampling)


def check_allowed(sampling: SamplingInput, vocab_size: int) -> None:
    """Refuses allowed tokens that are others than those of the logits.

    Raises:
        WorkerError: Offsets do not cut the words, or these are more than the tokens need.
    """
    offsets = sampling.allowed_offsets
    widths = offsets[1:] - offsets[:-1]
    if len(offsets) != sampling.num_samples + 1 or offsets[0] != 0 or offsets[-1] != len(sampling.allowed_words):
        raise WorkerError(
            f"allowed_offsets must cut {len(sampling.allowed_words)} words into {sampling.num_samples} parts. "
            f"Given: {offsets.tolist()[:8]}"
        )
    if widths.size and (widths.min() < 0 or widths.max() > -(-vocab_size // 32)):
        raise WorkerError(f"allowed_words must have a bit for each of {vocab_size} tokens at most")


def _check_ranges(sampling: SamplingInput) -> None:
    """Checks the numbers that `SamplingParams` checked at the door, as they arrive."""
    if not sampling.num_samples:
        return
    reals = np.stack([getattr(sampling, name) for name in _REALS])
    inside = (reals >= _REALS_LOW) & (reals <= _REALS_HIGH) & ~((reals == _REALS_LOW) & _REALS_LOW_OUTSIDE)
    if not inside.all():
        row, sample = np.argwhere(~inside)[0].tolist()
        name, rule = list(_REALS.items())[row]
        raise WorkerError(f"{name} {rule.text}. Given: {reals[row, sample]}")
    for name, least in _LEAST.items():
        smallest = getattr(sampling, name).min()
        if smallest < least:
            raise WorkerError(f"{name} must be at least {least}. Given: {smallest}")


def sample(
    step: int,
    logits: Float32Array,
    sampling: SamplingInput,
    previous: Int32Array,
    choose_tokens: ChooseTokens = token_choice.choose_tokens,
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
    row_errors: dict[int, str] = {}
    for row in np.flatnonzero(choices.failures).tolist():
        if choices.failures[row] == Failure.LOGITS:
            row_errors[row] = f"the model's logits allow no choice: the largest is {choices.largest[row]}"
        else:
            row_errors[row] = "penalties, bias and allowed tokens leave no token to choose"
    return StepOutput(step, choices.token_ids, logprobs, top, row_errors)
