"""The configuration of a GGUF file, converted to the keys of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.gguf import Gguf, files_of, read_gguf
from llm_serving.formats.gguf_layouts import HeadCounts
from llm_serving.formats.gguf_weights import FREQUENCIES, LONG_FREQUENCIES, SHORT_FREQUENCIES
from llm_serving.formats.stored_tensor import StoredTensor
from llm_serving.models.attention import fraction_of
from llm_serving.models.config_reader import MAX_LAYERS
from llm_serving.models.gguf_architectures import ARCHITECTURES
from llm_serving.models.gguf_metadata import Architecture, Config, MetadataReader
from llm_serving.models.pooling import POOLING

SUFFIX: Final = ".gguf"

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
_ROPE_THETA: Final = 10000.0
_NEEDED: Final = ("embedding_length", "block_count", "attention.head_count")
_END_IDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_SCALINGS: Final = ("none", "linear", "yarn")
_POOLING: Final[Mapping[Any, str]] = {1: "mean", 2: "cls", 3: "lasttoken"}
_MAX_ROTATION: Final = 2**12


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and not path.is_dir()


def gguf_models(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder; a model in several parts counts once, by its first part."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path == files_of(path)[0])


def gguf_name(path: Path) -> str:
    return path.stem.removesuffix(f"-00001-of-{len(files_of(path)):05}")


def read_config(path: Path) -> tuple[dict[str, Any], Gguf]:
    """Return the config.json that describes a GGUF model, and the format of its weights. Raise ModelError if the file
    is unreadable or not supported.
    """
    found = read_gguf(path)
    reader = MetadataReader(found)
    architecture = ARCHITECTURES.get(reader.architecture)
    if architecture is None:
        raise reader.fail("general.architecture", f"must be one of {', '.join(ARCHITECTURES)}")
    if "expert_count" not in architecture.numbers and reader.own("expert_count"):
        raise reader.fail(reader.key("expert_count"), "must be 0: this architecture has no experts")
    for name in _NEEDED:
        reader.needed(name)
    if reader.positive("block_count") > MAX_LAYERS:
        raise reader.fail(reader.key("block_count"), f"must be at most {MAX_LAYERS}")
    name = "feed_forward_length"
    if not reader.own("expert_count") and not (architecture.has_lists and reader.numbers(name)):
        reader.needed(name)
    config: Config = {"architectures": [architecture.family], "rope_theta": _ROPE_THETA}
    for name, known in {**_NUMBERS, **architecture.numbers}.items():
        if architecture.has_lists and reader.numbers(name) is not None:
            continue  # a list with a number for each layer, which `complete` reads
        if (value := reader.own(name)) is not None:
            config[known] = value
    table = found.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{found.file}: must have a tensor token_embd.weight with two dimensions")
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = not reader.has_tensor("output.weight")
    config |= architecture.fixed
    for key, names in architecture.bias.items():
        config[key] = any(map(reader.has_in_layer, names))
    heads = _check_heads(reader, architecture, config)
    if (scaling := _scaling(reader, config)) is not None:
        config["rope_scaling"] = scaling
    if architecture.complete is not None:
        architecture.complete(reader, config)
    ids = {key: reader.number(f"tokenizer.ggml.{key}") for key in ("bos_token_id", *_END_IDS, "padding_token_id")}
    config["bos_token_id"], config["pad_token_id"] = ids["bos_token_id"], ids["padding_token_id"]
    config["eos_token_id"] = list(dict.fromkeys(ids[key] for key in _END_IDS if ids[key] is not None)) or None
    if (pooling := reader.own("pooling_type")) in _POOLING:
        config[POOLING] = _POOLING[pooling]
    kv_heads = config.get("num_key_value_heads", heads)
    linear = (config.get(f"linear_{key}", 0) for key in ("num_key_heads", "num_value_heads", "value_head_dim"))
    counts = HeadCounts(heads, kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else 0, *linear)
    description = ", ".join(["GGUF", *found.types])
    return config, Gguf(description, reader.architecture, counts, found.block_elements, found.block_bytes)


def _check_heads(reader: MetadataReader, architecture: Architecture, config: Config) -> int:
    """Check the sizes of heads, and add the rotated fraction of a head to `config`. Return the number of heads."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if not isinstance(heads, int) or not isinstance(hidden, int) or not 0 < heads <= hidden:
        raise reader.fail(reader.key("attention.head_count"), f"must be an integer from 1 to {hidden}")
    if reader.own("attention.kv_lora_rank") is not None:
        return heads  # latent attention has other keys for the sizes of heads
    own = config.get("head_dim", hidden // heads)
    if not isinstance(own, int) or own < 1:
        raise reader.fail(reader.key("attention.key_length"), "must be an integer >= 1")
    rotary = reader.own("rope.dimension_count") if architecture.rotates else None
    if architecture.rotates_a_part and isinstance(rotary, int) and 0 < rotary <= own:
        config["partial_rotary_factor"] = fraction_of(rotary, own)
        rotary = None
    for name, value in (
        ("attention.value_length", reader.own("attention.value_length")),
        ("rope.dimension_count", rotary),
    ):
        if value not in (None, own):
            raise reader.fail(reader.key(name), f"must be {own}, the size of a head")
    return heads


def _scaling(reader: MetadataReader, config: Config) -> dict[str, Any] | None:
    """Return `rope_scaling` of the config.json, or None if the file has no RoPE scaling.

    Frequency divisors in tensors (Llama 3, Phi-3) become `longrope`. Other files name the method in their metadata.
    """
    kind = reader.value(reader.key("rope.scaling.type"), "none")
    has_lists = reader.has_tensor(LONG_FREQUENCIES) or reader.has_tensor(SHORT_FREQUENCIES)
    if kind not in _SCALINGS and not (has_lists and kind == "longrope"):
        raise reader.fail(reader.key("rope.scaling.type"), f"must be one of {', '.join(_SCALINGS)}")
    factor = reader.own("rope.scaling.attn_factor")
    original = reader.own("rope.scaling.original_context_length")
    first = {} if original is None else {"original_max_position_embeddings": original}
    if has_lists:
        short, long = (_divisors(reader, name, kind) for name in (SHORT_FREQUENCIES, LONG_FREQUENCIES))
        own_factor = {} if factor is None else {"attention_factor": factor}
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **first, **own_factor}
    if factor not in (None, 1):
        raise reader.fail(reader.key("rope.scaling.attn_factor"), "must be 1")
    if reader.has_tensor(FREQUENCIES):
        # longrope has one list for short and one for long contexts; here both are the same.
        each = _divisors(reader, FREQUENCIES, kind)
        return {"rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": reader.own("rope.scaling.factor"), **first}
    if kind == "yarn":
        scaling |= _yarn(reader)
    return scaling


def _yarn(reader: MetadataReader) -> dict[str, Any]:
    if reader.own("rope.scaling.yarn_attn_factor") not in (None, 1):
        raise reader.fail(reader.key("rope.scaling.yarn_attn_factor"), "must be 1")
    found = {ours: reader.own(f"rope.scaling.yarn_{ours}") for ours in ("beta_fast", "beta_slow")}
    return {name: value for name, value in found.items() if value is not None}


def _divisors(reader: MetadataReader, name: str, kind: str) -> list[float]:
    divisors = reader.found.tensors.get(name)
    is_stored = isinstance(divisors, StoredTensor) and len(divisors.shape) == 1 and divisors.shape[0] <= _MAX_ROTATION
    if divisors is None or kind not in ("none", "longrope") or not is_stored:
        raise ModelError(
            f"{reader.found.file}: tensor {name} must be a vector of at most {_MAX_ROTATION} unquantized elements, and "
            f"`{reader.key('rope.scaling.type')}` must be none or longrope. Given: {kind}"
        )
    return [float(value) for value in np.array(divisors.read(), np.float64)]
