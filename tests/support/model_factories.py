"""Tiny models with random weights, written as Hugging Face folders."""

import json
from pathlib import Path

import numpy as np
from llm_serving.models.spec import ModelSpec

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}


def tiny_spec(**changes) -> ModelSpec:
    """The spec of `TINY`, with changes."""
    return ModelSpec.from_hugging_face({**TINY, **changes})


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor."""
    return spec.tensors


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 weights, scaled so that activations keep their size; each is exactly a bfloat16 value."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        values = rng.normal(size=shape).astype(np.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith("bias"):
            values *= 0.1
        elif name != "model.embed_tokens.weight":
            values /= np.sqrt(np.float32(shape[1]))
        weights[name] = from_bfloat16(to_bfloat16(values.astype(np.float32)))
    return weights


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16 of finite float32 values, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one file; uint16 arrays are stored as bfloat16, uint8 as e4m3."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64"}
    names |= {"int8": "I8", "int32": "I32", "uint8": "F8_E4M3"}
    header, offset = {}, 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())


def write_model(folder: Path, spec: ModelSpec, seed: int = 0, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    """Write random weights of `spec` into `folder`; return them as float32."""
    weights = random_weights(spec, seed)
    stored = {
        name: to_bfloat16(array) if dtype == "bfloat16" else array.astype(dtype) for name, array in weights.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", stored)
    return weights
