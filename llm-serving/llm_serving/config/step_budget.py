"""How many tokens a step may compute where the operator does not say."""

from __future__ import annotations

from typing import Final

from llm_serving.config.values import Values
from llm_serving.core.model_spec import ModelSpec

KEY: Final = "scheduler_config.max_prefill_tokens"
CPU_STEP_OPERATIONS: Final = 1.2e12
"""A second or so of a few cores."""
SMALLEST: Final = 128
"""Rows. Products of so many are within a tenth of as quick as they get."""


def choose_step_budget(values: Values, spec: ModelSpec | None) -> None:
    """Sets `max_prefill_tokens` if it is not given and its default does not suit the model.

    On a CPU a step takes time in proportion to its tokens: a large one is no quicker for each of them, and all who come
    behind its prompts, and all who decode, wait for its end. So the default is halved until the weights, at two
    operations a token each, make no more than `CPU_STEP_OPERATIONS`. It always has room for every running request.

    Args:
        values: All that is given.
        spec: The model, if one is named.
    """
    if spec is None or values.is_given(KEY):
        return
    tokens = values[KEY]
    if values["device_config.device_target"] == "CPU":
        while tokens > SMALLEST and 2 * spec.num_parameters * tokens > CPU_STEP_OPERATIONS:
            tokens //= 2
    least = values["scheduler_config.max_long_prefill_tokens"] or 1, values["model_config.decode_batch_size"]
    tokens = max(tokens, *least)
    if tokens != values[KEY]:
        values.set(KEY, tokens, "size of the model")
