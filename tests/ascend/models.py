"""Small models with random weights, of each family that Ascend serves and of the shipped model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from families import models
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.models.spec import ModelSpec
from support.family_configs import CONFIGS, config_of
from support.model_factories import write_model

FAMILIES: Final = ("llama, biases, tied", "qwen3, experts")
"""Names in `support.family_configs`. Together they have each kind of operation that Ascend serves."""
_NO_WINDOW: Final = {"sliding_window": None}
MORE_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "llama, yarn": {},
    "qwen2": _NO_WINDOW | {"use_sliding_window": False},
    "qwen2, experts": {},
    "qwen3": {},
    "mistral": _NO_WINDOW,
    "mixtral": {},
    "phi3": _NO_WINDOW,
    "internlm2": {},
    "internlm3": {},
    "baichuan2, 7B": {},
    "glm": {},
    "glm4": {},
    "gemma": {},
    "granite": {},
    "smollm3": {},
    "seed-oss": {},
    "ernie4.5": {},
    "hunyuan": {},
    "hunyuan-moe": {},
    "ministral3": {},
    "olmo2-odd": {},
    "exaone4-full": {},
    "granite-moe": {"num_attention_heads": 2, "num_key_value_heads": 1},
}
"""The other families that Ascend serves: names in `support.family_configs` or `families.models`, with changes that
remove sliding windows or make heads a multiple of 32 wide. They take minutes, so only `python -m ascend.all_families`
starts them.
"""


_LARGE: Final = {"num_hidden_layers": 1, "hidden_size": 1024, "vocab_size": 20000}
LARGE_BYTES: Final = 2 * 2 * 1024 * 20000
"""Bytes of the token embedding and the LM head of the model `large`, nearly all of its weights."""


def write_models(folder: Path, families: Sequence[str] = FAMILIES, demo: Mapping[str, Any] = {}) -> dict[str, Path]:
    """Write a folder for `demo` with these changes, for `large` and for each family. All have few layers, because
    MindSpore compiles each for half a second.
    """
    shipped = json.loads((DEMO_FOLDER / "config.json").read_text())
    configs: dict[str, dict[str, Any]] = {
        "demo": shipped | {"num_hidden_layers": 1} | demo,
        "large": config_of("llama") | _LARGE,
    }
    configs |= {name: _short(family_config(name)) for name in families}
    folders = {}
    for index, (name, config) in enumerate(configs.items()):
        folders[name] = folder / str(index)
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps(config))
        write_model(folders[name], ModelSpec.from_folder(folders[name]))
    return folders


def family_config(name: str) -> dict[str, Any]:
    """Return the configuration of one of `FAMILIES` or `MORE_FAMILIES`."""
    config = config_of(name) if name in CONFIGS else models.model(name).config
    return {**config, **MORE_FAMILIES.get(name, {})}


def _short(config: dict[str, Any]) -> dict[str, Any]:
    """Keep as many layers as there are kinds of layers."""
    num_layers = 2 if "mlp_only_layers" in config or config.get("first_k_dense_replace") else 1
    kinds = {name: config[name][:num_layers] for name in ("layer_types",) if config.get(name)}
    return config | kinds | {"num_hidden_layers": num_layers}
