"""A Llama of a few hundred kilobytes as a Hugging Face folder without tokenizer."""

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from llm_serving.models.spec import ModelSpec
from support.model_factories import write_safetensors

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def small_tensors(**changes: object) -> dict[str, np.ndarray]:
    """Return Hugging Face name -> float32 array."""
    rng = np.random.default_rng(0)
    shapes = ModelSpec.from_hugging_face(CONFIG | changes).tensors
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_small_model(folder: Path, **changes: object) -> dict[str, np.ndarray]:
    """Write config.json and model.safetensors; return the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    tensors = small_tensors(**changes)
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


@cache
def small_weights() -> bytes:
    """Return the tensors of that model.safetensors."""
    with tempfile.TemporaryDirectory() as folder:
        write_small_model(Path(folder))
        return (Path(folder) / "model.safetensors").read_bytes()
