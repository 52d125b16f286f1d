"""The configuration of a GGUF file, converted to the keys of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from llm_serving.errors import ModelError, shorten
from llm_serving.formats.gguf import METHOD, ROTATION, GgufFile, read_gguf
from llm_serving.formats.stored_tensor import StoredTensor

SUFFIX: Final = ".gguf"

_ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NUMBERS: Final[Mapping[str, str]] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Metadata key after the architecture's prefix -> key of a config.json."""
_NEEDED: Final = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count")
_END_IDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_SCALINGS: Final = ("none", "linear", "yarn")
_MAX_ROTATION: Final = 2**12


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and not path.is_dir()


def read_config(path: Path) -> dict[str, Any]:
    """Return the config.json that describes the model of a GGUF file.

    Raises:
        ModelError: The file cannot be read, or its model is not supported in this format.
    """
    return config_of(read_gguf(path))


def config_of(found: GgufFile) -> dict[str, Any]:
    """As `read_config`, for a header that was read already."""
    reader = _MetadataReader(found)
    name = reader.value("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise reader.fail("general.architecture", f"must be one of {', '.join(_ARCHITECTURES)}")
    if reader.value(f"{name}.expert_count"):
        raise reader.fail(f"{name}.expert_count", "must be 0: experts are not read from GGUF files")
    for key in _NEEDED:
        if reader.value(f"{name}.{key}") is None:
            raise reader.fail(f"{name}.{key}", "must be given")
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[name]]}
    for key, known in _NUMBERS.items():
        if (value := reader.number(f"{name}.{key}")) is not None:
            config[known] = value
    table = found.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{found.file}: must have a tensor token_embd.weight of two lengths")
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in found.tensors
    if name == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in found.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in found.tensors
    _check_heads(reader, name, config)
    if (scaling := _scaling(reader, name, config)) is not None:
        config["rope_scaling"] = scaling
    ids = {key: reader.number(f"tokenizer.ggml.{key}") for key in ("bos_token_id", *_END_IDS, "padding_token_id")}
    config["bos_token_id"], config["pad_token_id"] = ids["bos_token_id"], ids["padding_token_id"]
    config["eos_token_id"] = list(dict.fromkeys(ids[key] for key in _END_IDS if ids[key] is not None)) or None
    heads = config["num_attention_heads"]
    head_counts = {"heads": heads, "kv_heads": config.get("num_key_value_heads", heads)} if name == "llama" else {}
    blocks = {"block_elements": found.block_elements, "block_bytes": found.block_bytes}
    config["quantization_config"] = {"quant_method": METHOD, "types": list(found.types), **head_counts, **blocks}
    return config


def _check_heads(reader: _MetadataReader, name: str, config: Mapping[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if not isinstance(heads, int) or not isinstance(hidden, int) or not 0 < heads <= hidden:
        raise reader.fail(f"{name}.attention.head_count", f"must be an integer from 1 to {hidden}")
    own = config.get("head_dim", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.value(f"{name}.{key}", own) != own:
            raise reader.fail(f"{name}.{key}", f"must be the {own} elements of a head")


def _scaling(reader: _MetadataReader, name: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling`: by name, or as one divisor for each frequency, as Llama 3 files store it."""
    kind = reader.value(f"{name}.rope.scaling.type", "none")
    if kind not in _SCALINGS:
        raise reader.fail(f"{name}.rope.scaling.type", f"must be one of {', '.join(_SCALINGS)}")
    factor = f"{name}.rope.scaling.attn_factor"
    if reader.number(factor) not in (None, 1):
        raise reader.fail(factor, "must be 1")
    divisors = reader.found.tensors.get(ROTATION)
    if divisors is not None:
        if kind != "none" or not isinstance(divisors, StoredTensor) or not _is_short(divisors.shape):
            raise ModelError(f"{reader.found.file}: {ROTATION} must be a list of float32, without another scaling")
        # longrope has one list for short and one for long contexts; here both are the same.
        each = [float(value) for value in np.array(divisors.read(), np.float64)]
        return {"rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": reader.number(f"{name}.rope.scaling.factor")}
    if (original := reader.number(f"{name}.rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _is_short(shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 and shape[0] <= _MAX_ROTATION


class _MetadataReader:
    """Reads metadata values by key; an error names the key, the rule and the value."""

    def __init__(self, found: GgufFile) -> None:
        self.found = found

    def value(self, key: str, default: Any = None) -> Any:
        value = self.found.metadata.get(key)
        is_unread = value is None and key in self.found.metadata  # a list of strings
        if is_unread or isinstance(value, np.ndarray):
            raise self.fail(key, "must be one value and no list")
        return default if value is None else value

    def number(self, key: str) -> int | float | None:
        """Return a number; a float32 as its shortest decimal: 1e-5 and not 9.99999975e-06."""
        value = self.value(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if not isinstance(value, float):
            raise self.fail(key, "must be a number")
        with np.errstate(over="ignore"):  # the rule of the key refuses infinity
            return float(str(np.float32(value)))

    def fail(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.found.file}: `{key}` {rule}. Given: {shorten(self.found.metadata.get(key))}")
