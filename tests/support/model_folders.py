"""Model folders without weights, for tests that read only a config.json."""

from __future__ import annotations

import json
from pathlib import Path

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
