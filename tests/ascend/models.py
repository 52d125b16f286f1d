"""Small models with random weights, of each family that Ascend serves and of the shipped model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.models.spec import ModelSpec
from support.family_configs import config_of
from support.model_factories import write_model

FAMILIES: Final = ("llama, biases, tied", "qwen3, experts")
"""Names in `support.family_configs`. Together they have each kind of operation that Ascend serves."""
MORE_FAMILIES: Final = (
    "llama",
    "llama, yarn",
    "qwen2, experts",
    "qwen3",
    "mixtral",
    "internlm2",
    "internlm3",
    "baichuan2, 7B",
    "granite",
    "smollm3",
)
"""The other families that Ascend serves. They take minutes, so only `python -m ascend.all_families` starts them."""


_LARGE: Final = {"num_hidden_layers": 1, "hidden_size": 1024, "vocab_size": 20000}
LARGE_BYTES: Final = 2 * 2 * 1024 * 20000
"""Bytes of the token embedding and the LM head of the model `large`, nearly all of its weights."""


def write_models(folder: Path, families: Sequence[str] = FAMILIES) -> dict[str, Path]:
    """Write a folder for `demo`, for `large` and for each family. All have few layers, because MindSpore compiles each
    for half a second.
    """
    demo = json.loads((DEMO_FOLDER / "config.json").read_text()) | {"num_hidden_layers": 1}
    configs: dict[str, dict[str, Any]] = {"demo": demo, "large": config_of("llama") | _LARGE}
    configs |= {name: _short(config_of(name)) for name in families}
    folders = {}
    for index, (name, config) in enumerate(configs.items()):
        folders[name] = folder / str(index)
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps(config))
        write_model(folders[name], ModelSpec.from_folder(folders[name]))
    return folders


def _short(config: dict[str, Any]) -> dict[str, Any]:
    """Keep as many layers as there are kinds of layers."""
    return config | {"num_hidden_layers": 2 if "mlp_only_layers" in config else 1}
