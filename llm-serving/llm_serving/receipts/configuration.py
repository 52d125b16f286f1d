"""Which keys of the configuration can change a byte of an answer: all but those that are known not to."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from llm_serving.config.schema import SECTIONS, ServingConfig

COMPUTING: Final = ("model_config", "pa_config", "device_config", "quant_config")
"""Sections that say what is computed, and how; the others say when, for whom and in which order."""
WITHOUT_EFFECT: Final = frozenset(
    {
        # Names and places; what they lead to is hashed.
        *("model_name", "model_aliases", "model_path", "model_hub", "model_revision", "model_cfg_path"),
        "tokenizer_path",
        # A receipt has what they came to: parameters, most tokens of a request, ids that end a text.
        *("generation_config", "max_generate_length", "seq_length", "end_token"),
        # Must be what the model says.
        *("vocab_size", "pad_token_id"),
        # How much at once, and when; `kernels` is told by who computes.
        *("prefill_batch_size", "decode_batch_size", "batch_waiting_time", "batching_strategy", "kernels"),
        *("num_blocks", "num_swap_blocks", "decode_seq_length", "num_threads", "max_device_memory"),
        # Served alike whatever they say, or only written down.
        *("page_attention", "backend", "save_graphs", "save_graphs_path"),
    }
)


Setting = str | int | bool | None


def settings_of(config: ServingConfig) -> dict[str, Setting]:
    """Every "section.key" that can change a byte, and its value; a new key is among them until it is said not to."""
    settings: dict[str, Setting] = {}
    for section in COMPUTING:
        attribute, kind = SECTIONS[section]
        for field in fields(kind):
            if field.name not in WITHOUT_EFFECT:
                value = getattr(getattr(config, attribute), field.name)
                settings[f"{section}.{field.name}"] = value if isinstance(value, Setting) else repr(value)
    return settings
