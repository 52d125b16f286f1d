"""The configuration keys that can change a byte of a response, and that receipts record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llm_serving.config.schema import SECTIONS, ServingConfig

Setting = str | int | bool | None

OUTPUT_KEYS: Final[Mapping[str, Setting]] = {
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
"""Key that can change a byte of a response -> the value assumed for receipts issued before the key existed."""


def output_settings(config: ServingConfig) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for key in OUTPUT_KEYS:
        section, _, name = key.partition(".")
        settings[key] = getattr(getattr(config, SECTIONS[section][0]), name)
    return settings
