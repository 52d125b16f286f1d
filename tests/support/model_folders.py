"""Model folders without weights and serving YAMLs, for tests that read only configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm_serving.config import load_config
from llm_serving.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_config(folder: Path, **changes: object) -> Path:
    """Return a new folder with a changed `LLAMA` configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def write_yaml(folder: Path, text: str, name: str = "serving.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_of(path: Path | None, *overrides: str, model: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, model)
    return str(caught.value)
