"""How many tokens a step may compute where the operator does not say."""

from __future__ import annotations

from typing import Final

from llm_serving.config.values import Values
from llm_serving.models.spec import ModelSpec

KEY: Final = "scheduler_config.max_prefill_tokens"
LONG_PREFILL: Final = "scheduler_config.max_long_prefill_tokens"
NUM_SEQS: Final = "model_config.decode_batch_size"
CPU_STEP_OPERATIONS: Final = 1.2e12
"""A second or so of a few cores."""
CPU_STEP_TOKENS: Final = 512
"""However small the model: four times as many are no quicker a token, and running streams wait four times as long
beside a flood of prompts (docs/scheduling.md)."""
SMALLEST: Final = 128
"""Tokens of prompts. Products of so many rows are within a tenth of as quick as they get."""


PREFILL_GAP: Final = "scheduler_config.max_consecutive_prefill_steps"
SEPARATE_PREFILL_GAP: Final = 4
"""Steps. Where a step decodes or computes prompts, decoding after each step of prompts would take half of the time."""


def choose_prefill_gap(values: Values) -> None:
    """Sets `max_consecutive_prefill_steps` if it is not given and steps are separate."""
    if not values.is_given(PREFILL_GAP) and values["scheduler_config.composition"] == "separate":
        values.set(PREFILL_GAP, SEPARATE_PREFILL_GAP, "scheduler_config.composition")


def choose_step_budget(values: Values, spec: ModelSpec | None) -> None:
    """Sets `max_prefill_tokens` if it is not given and its default does not suit the model.

    On a CPU a step takes time in proportion to its tokens: a large one is no quicker for each of them, and all who
    come behind its prompts, and all who decode, wait for its end. So the default is `CPU_STEP_TOKENS`, halved until the
    weights of the layers, at two operations a token each, make no more than `CPU_STEP_OPERATIONS`. On every device
    there is room for all running requests beside a part of a prompt, and for what `max_long_prefill_tokens`
    grants.

    Args:
        values: All that is given.
        spec: The model, if one is named.
    """
    if values.is_given(KEY):
        return
    tokens, source = values[KEY], "default"
    if spec is not None and values["device_config.device_target"] == "CPU":
        tokens, source = min(tokens, CPU_STEP_TOKENS), "device_config.device_target"
        while tokens > SMALLEST and 2 * spec.num_multiplied * tokens > CPU_STEP_OPERATIONS:
            tokens, source = tokens // 2, "size of the model"
    for key, least in ((NUM_SEQS, values[NUM_SEQS] + SMALLEST), (LONG_PREFILL, values[LONG_PREFILL] or 0)):
        if least > tokens:
            tokens, source = least, key
    if tokens != values[KEY]:
        values.set(KEY, tokens, source)
