"""Which keys of the configuration can change a byte of an answer: one table of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.config.schema import SECTIONS, ServingConfig

Setting = str | int | bool | None

SETTINGS: Final[Mapping[str, Setting]] = {
    "model_config.model_dtype": "bfloat16",
    "model_config.implementation": "native",
    "pa_config.block_size": 16,
    "device_config.device_target": "CPU",
    "device_config.exactness": "exact",
    "device_config.enable_graph_kernel": False,
    "device_config.graph_kernel_flags": "",
    "device_config.jit_level": "O0",
    "quant_config.quantization": None,
    "quant_config.group_size": 128,
    "quant_config.kv_cache_dtype": "auto",
}
"""Keys that can change a byte, which a receipt has; and what a receipt means that lacks one: what servers did before
there was the key, whatever its default is now."""

TOLD: Final[Mapping[str, str]] = {
    # What the files hold.
    "model_config.model_path": "weights",
    "model_config.tokenizer_path": "tokenizer",
    "model_config.backend": "computed_by",
    "model_config.mindir_path": "weights",
    "model_config.mindir_ini": "weights",
    "device_config.kernels": "computed_by",
    "cluster_config.tensor_parallel": "computed_by",
    "model_config.max_generate_length": "max_model_len",
    "model_config.end_token": "end_token_ids",
    # How a request is read; the tokens that come of it are computed from these alone.
    "model_config.generation_config": "sampling",
    "serving_config.json_whitespace": "sampling",
    "serving_config.tool_call_parser": "sampling",
    "serving_config.reasoning_parser": "sampling",
    "serving_config.low_effort_token_budget": "sampling",
    "serving_config.medium_effort_token_budget": "sampling",
    "serving_config.high_effort_token_budget": "sampling",
}
"""Keys that can change a byte through what another field of a receipt has, and that field."""

WITHOUT_EFFECT: Final = frozenset(
    {
        # Names, and where things are found.
        *("model_config.model_name", "model_config.model_aliases", "model_config.model_hub"),
        *("model_config.model_revision", "model_config.model_cfg_path"),
        # Must be what the model says, or refuse more.
        *("model_config.vocab_size", "model_config.pad_token_id", "model_config.seq_length"),
        # How much at once, and when.
        *("model_config.prefill_batch_size", "model_config.decode_batch_size", "model_config.batch_waiting_time"),
        *("model_config.batching_strategy", "pa_config.num_blocks", "pa_config.num_swap_blocks"),
        *("pa_config.decode_seq_length", "device_config.num_threads", "device_config.max_device_memory"),
        # Served alike whatever they say, only written down, or of vectors, which have no receipts.
        *("model_config.page_attention", "device_config.save_graphs", "device_config.save_graphs_path"),
        "model_config.pooling",
        # Where, for whom, in which order and with which limits: no key of these sections but those above.
        *("scheduler_config.*", "serving_config.*", "cluster_config.*"),
    }
)
"""Keys that change no byte; `*`: all of a section that are not named otherwise."""


def settings_of(config: ServingConfig) -> dict[str, Setting]:
    """Every "section.key" that can change a byte, and its value."""
    settings: dict[str, Setting] = {}
    for key in SETTINGS:
        section, _, name = key.partition(".")
        settings[key] = getattr(getattr(config, SECTIONS[section][0]), name)
    return settings


def settings_told(configuration: Mapping[str, Setting]) -> dict[str, Setting]:
    """What a receipt says of every key that can change a byte, and of keys that this version does not know.

    Receipts of older servers have keys that change none, which are left out, and lack newer ones.
    """
    return dict(SETTINGS) | {key: value for key, value in configuration.items() if not _is_without_effect(key)}


def _is_without_effect(key: str) -> bool:
    section = key.partition(".")[0]
    return key not in SETTINGS and (key in TOLD or not WITHOUT_EFFECT.isdisjoint((key, f"{section}.*")))
