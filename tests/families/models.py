"""Small random models of every family, and what they should answer.

    from families import models
    for name in models.names():
        models.write(name, folder)      # config.json, generation_config.json, model.safetensors
        golden = models.golden(name)    # prompts, logits of some positions, the tokens that follow

The same bytes on every machine; needs NumPy and safetensors. `PYTHONPATH=tests python -m families.models NAME FOLDER`
writes one for other programs.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from families import (
    baichuan,
    deepseek,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    internlm,
    layer_norms,
    lfm2,
    llama,
    llama4,
    llama_likes,
    mamba,
    minicpm3,
    mixtures,
    phi3,
    post_norms,
    qwen,
    qwen_next,
)
from families.drawn import to_bfloat16
from families.model import Model
from families.weights import weights_of
from safetensors import TensorSpec, safe_open, serialize_file

GOLDEN = Path(__file__).with_name("golden")
NEW_TOKENS = 24
FAMILIES = (
    llama,
    llama4,
    qwen,
    phi3,
    internlm,
    baichuan,
    glm,
    gemma,
    gemma4,
    llama_likes,
    post_norms,
    layer_norms,
    mixtures,
    gpt_oss,
    deepseek,
    minicpm3,
    lfm2,
    qwen_next,
    mamba,
)
WRITERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": to_bfloat16,
    "float16": lambda values: values.astype(np.float16),
    "float32": lambda values: values,
}


@dataclass(frozen=True)
class Prompt:
    """A prompt and its answer."""

    token_ids: np.ndarray
    """[num_tokens], int32."""

    positions: np.ndarray
    """[k], int32, ascending; the last one is the prompt's last position."""

    logits: np.ndarray
    """[k, vocab_size], float32: what follows each of `positions`."""

    generated: np.ndarray
    """[NEW_TOKENS], int32: greedy; none is an end token."""


@dataclass(frozen=True)
class Golden:
    digest: str
    """Digest of the model that the values belong to."""

    served_length: int | None
    """The longest context that the server must be configured for; None if it does not matter."""

    prompts: dict[int, Prompt]
    """By number of tokens."""


@functools.cache
def _models() -> dict[str, Model]:
    return {name: model for family in FAMILIES for name, model in family.models().items()}


def names() -> list[str]:
    return list(_models())


def model(name: str) -> Model:
    if name not in _models():
        raise ValueError(f"name must be one of {', '.join(names())}. Given: {name}")
    return _models()[name]


def weights(name: str) -> dict[str, np.ndarray]:
    """Name -> float32 tensor."""
    return weights_of(name, model(name))


def digest(name: str) -> str:
    """SHA-256 over both configurations and every tensor's name, shape and float32 bytes."""
    found = hashlib.sha256()
    for part in (model(name).config, model(name).generation):
        found.update(json.dumps(part, sort_keys=True).encode())
    for tensor, values in sorted(weights(name).items()):
        found.update(f"{tensor} {values.shape}".encode() + values.astype("<f4").tobytes())
    return found.hexdigest()


def write(
    name: str, folder: Path, *, dtype: str = "bfloat16", shards: int = 1, changes: dict[str, Any] | None = None
) -> None:
    """Writes the model as people find it.

    Args:
        dtype: bfloat16, float16 or float32; the values are the same in each.
        shards: Files the tensors are spread over; from two on with an index.
        changes: Of config.json; None removes a key. Layers that it then has not have no tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    typed = {key: dtype for key in ("torch_dtype", "dtype") if key in model(name).config}
    config = model(name).config | typed | (changes or {})
    config = {key: value for key, value in config.items() if value is not None or key not in (changes or {})}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", model(name).generation)
    left_out = range(config["num_hidden_layers"], model(name).config["num_hidden_layers"])
    kept = {
        tensor: values
        for tensor, values in weights(name).items()
        if not any(f"layers.{layer}." in tensor for layer in left_out)
    }
    tensors = {tensor: np.ascontiguousarray(WRITERS[dtype](values)) for tensor, values in kept.items()}
    if shards == 1:
        _write_tensors(folder / "model.safetensors", tensors, dtype)
        return
    listed = list(tensors)
    files = {f"model-{k + 1:05}-of-{shards:05}.safetensors": listed[k::shards] for k in range(shards)}
    for file, inside in files.items():
        _write_tensors(folder / file, {tensor: tensors[tensor] for tensor in inside}, dtype)
    _write_json(
        folder / "model.safetensors.index.json",
        {
            "metadata": {"total_size": sum(values.nbytes for values in tensors.values())},
            "weight_map": {tensor: file for file, inside in files.items() for tensor in inside},
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write_tensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    listed = {
        name: TensorSpec(dtype=dtype, shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes)
        for name, values in tensors.items()
    }
    serialize_file(listed, str(path), {"format": "pt"})


def golden(name: str) -> Golden:
    """Raises `FileNotFoundError` for a model without golden values."""
    model(name)
    with safe_open(GOLDEN / f"{name}.safetensors", framework="np") as stored:
        facts = json.loads(stored.metadata()["facts"])
        prompts = {
            length: Prompt(*(stored.get_tensor(f"{length}.{part}") for part in Prompt.__annotations__))
            for length in sorted({int(key.split(".")[0]) for key in stored.keys()})  # noqa: SIM118
        }
    return Golden(facts["digest"], facts["served_length"], prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a small random model as a Hugging Face folder.")
    parser.add_argument("name", choices=names())
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=list(WRITERS), default="bfloat16")
    parser.add_argument("--shards", type=int, default=1)
    given = parser.parse_args()
    write(given.name, given.folder, dtype=given.dtype, shards=given.shards)


if __name__ == "__main__":
    main()
