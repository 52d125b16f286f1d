"""The facts of a GGUF file in the words of a config.json."""

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
"""Key behind the name of the architecture -> key of a config.json."""
_NEEDED: Final = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count")
_END_IDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_SCALINGS: Final = ("none", "linear", "yarn")
_MAX_ROTATION: Final = 2**12


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and not path.is_dir()


def read_config(path: Path) -> dict[str, Any]:
    """What the config.json of the model would say.

    Raises:
        ModelError: The file cannot be read, or is of a model that is not served in this form.
    """
    return config_of(read_gguf(path))


def config_of(found: GgufFile) -> dict[str, Any]:
    """As `read_config`, of a file whose header was read."""
    facts = _Facts(found)
    name = facts.value("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise facts.fail("general.architecture", f"must be one of {', '.join(_ARCHITECTURES)}")
    if facts.value(f"{name}.expert_count"):
        raise facts.fail(f"{name}.expert_count", "must be 0: experts are not read out of this form")
    for key in _NEEDED:
        if facts.value(f"{name}.{key}") is None:
            raise facts.fail(f"{name}.{key}", "must be given")
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[name]]}
    for key, known in _NUMBERS.items():
        if (value := facts.number(f"{name}.{key}")) is not None:
            config[known] = value
    table = found.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{found.file}: must have a tensor token_embd.weight of two lengths")
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in found.tensors
    if name == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in found.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in found.tensors
    _check_heads(facts, name, config)
    if (scaling := _scaling(facts, name, config)) is not None:
        config["rope_scaling"] = scaling
    ids = {key: facts.number(f"tokenizer.ggml.{key}") for key in ("bos_token_id", *_END_IDS, "padding_token_id")}
    config["bos_token_id"], config["pad_token_id"] = ids["bos_token_id"], ids["padding_token_id"]
    config["eos_token_id"] = list(dict.fromkeys(ids[key] for key in _END_IDS if ids[key] is not None)) or None
    heads = config["num_attention_heads"]
    turned = {"heads": heads, "kv_heads": config.get("num_key_value_heads", heads)} if name == "llama" else {}
    config["quantization_config"] = {"quant_method": METHOD, "types": list(found.types), **turned}
    return config


def _check_heads(facts: _Facts, name: str, config: Mapping[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if not isinstance(heads, int) or not isinstance(hidden, int) or not 0 < heads <= hidden:
        raise facts.fail(f"{name}.attention.head_count", f"must be an integer from 1 to {hidden}")
    own = config.get("head_dim", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.value(f"{name}.{key}", own) != own:
            raise facts.fail(f"{name}.{key}", f"must be the {own} elements of a head")


def _scaling(facts: _Facts, name: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling`: by name, or a divisor for each frequency as Llama 3 has them."""
    kind = facts.value(f"{name}.rope.scaling.type", "none")
    if kind not in _SCALINGS:
        raise facts.fail(f"{name}.rope.scaling.type", f"must be one of {', '.join(_SCALINGS)}")
    factor = f"{name}.rope.scaling.attn_factor"
    if facts.number(factor) not in (None, 1):
        raise facts.fail(factor, "must be 1")
    divisors = facts.found.tensors.get(ROTATION)
    if divisors is not None:
        if kind != "none" or not isinstance(divisors, StoredTensor) or not _is_short(divisors.shape):
            raise ModelError(f"{facts.found.file}: {ROTATION} must be a list of float32, without another scaling")
        # Whatever the length of a context: the kind of scaling that lists divisors has two lists for two lengths.
        each = [float(value) for value in np.array(divisors.read(), np.float64)]
        return {"rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": facts.number(f"{name}.rope.scaling.factor")}
    if (original := facts.number(f"{name}.rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _is_short(shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 and shape[0] <= _MAX_ROTATION


class _Facts:
    """Values by key; a wrong one is refused by its key, its rule and its value."""

    def __init__(self, found: GgufFile) -> None:
        self.found = found

    def value(self, key: str, default: Any = None) -> Any:
        value = self.found.facts.get(key)
        is_unread = value is None and key in self.found.facts  # a list of texts
        if is_unread or isinstance(value, np.ndarray):
            raise self.fail(key, "must be one value and no list")
        return default if value is None else value

    def number(self, key: str) -> int | float | None:
        """A float32 by its shortest decimal: 1e-5 and not 9.99999975e-06."""
        value = self.value(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if not isinstance(value, float):
            raise self.fail(key, "must be a number")
        with np.errstate(over="ignore"):  # what is infinite then is refused by its rule
            return float(str(np.float32(value)))

    def fail(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.found.file}: `{key}` {rule}. Given: {shorten(self.found.facts.get(key))}")
