"""What `model.model_config` of a MindFormers YAML says, in the words of a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from llm_serving.errors import ModelError, shorten
from llm_serving.models import chatglm
from llm_serving.models.facts import Facts

_FAMILIES: Final[Mapping[str, str]] = {
    "ChatGLM": chatglm.ARCHITECTURE,
    "Glm4For": "Glm4ForCausalLM",
    "Baichuan": "BaichuanForCausalLM",
    "InternLM3": "InternLM3ForCausalLM",
    "InternLM2": "InternLM2ForCausalLM",
    "Qwen3Moe": "Qwen3MoeForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
    "Qwen2": "Qwen2ForCausalLM",
}
"""How the class of a network there begins -> what serves it."""
_LIKE_LLAMA: Final = ("Llama", "Qwen", "InternLM")
"""Beginnings of those that are a Llama, or with biases a Qwen2."""
_EXTENSIONS: Final = ("None", "PI", "linear", "NTK", "YARN", "LLAMA3")

_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def hugging_face_config(config: Mapping[str, Any], network: str, where: str) -> dict[str, Any]:
    """The content of a config.json.

    Args:
        config: `model.model_config`.
        network: `model.arch.type`, or an empty text.
        where: Names the file in errors.

    Raises:
        ModelError: The network is none of these, or a fact is missing or out of its range.
    """
    facts = Facts(config, where)
    architecture = _architecture(facts, network)
    if architecture == chatglm.ARCHITECTURE:
        return {**config, "architectures": [architecture]}
    if facts.has("num_hidden_layers"):  # newer releases have the facts as Hugging Face names them
        activation = {"hidden_act": "silu"} if config.get("hidden_act") == "swiglu" else {}
        return {**config, **activation, "architectures": [architecture]}
    return _of_llama(facts, architecture, network)


def _architecture(facts: Facts, network: str) -> str:
    listed = facts.config.get("architectures")
    given = (network, *(listed if isinstance(listed, list) else ()), facts.config.get("type"))
    names = [
        name.removeprefix("Parallel").removeprefix("Inference") for name in given if name and isinstance(name, str)
    ]
    for name in names:
        for beginning, architecture in _FAMILIES.items():
            if name.startswith(beginning):
                return architecture
    if names and not names[0].startswith(_LIKE_LLAMA):
        known = ", ".join(sorted({*_LIKE_LLAMA, *_FAMILIES}))
        raise ModelError(
            f"{facts.where}: the network's class must begin with one of {known}. Given: {shorten(names[0])}"
        )
    return "Qwen2ForCausalLM" if facts.boolean("qkv_has_bias") else "LlamaForCausalLM"


def _of_llama(facts: Facts, architecture: str, network: str) -> dict[str, Any]:
    """Facts of the kind that MindFormers' Llama has, and the networks made from it.

    It leaves `intermediate_size` out for the first Llama models: it follows from the rule of its code, two thirds of
    four times the width, before that times `ffn_dim_multiplier` and a hundredth, rounded up to `multiple_of`.
    """
    heads = facts.integer("num_heads")
    hidden = facts.integer("hidden_size")
    intermediate = facts.integer("intermediate_size", 0, least=0)
    if not intermediate:
        multiple = facts.integer("multiple_of", 256)
        width = 4 * hidden
        if facts.has("ffn_dim_multiplier"):
            width = int((facts.number("ffn_dim_multiplier") + 0.01) * width)
        intermediate = multiple * math.ceil(int(2 * width / 3) / multiple)
    positions = "model_max_length" if network.startswith("Baichuan13B") else "max_position_embeddings"
    longest = facts.integer("max_position_embedding", facts.integer("seq_length", 2048))
    theta, scaling = _rotation(facts)
    if scaling.get("rope_type") == "linear":  # here that is the stretched number
        longest = max(1, int(longest / scaling["factor"]))
    return {
        "architectures": [architecture],
        "vocab_size": facts.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": facts.integer("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("n_kv_heads", heads),
        "rms_norm_eps": facts.number("rms_norm_eps", 1e-5),
        "rope_theta": theta,
        **({"rope_scaling": scaling} if scaling else {}),
        "tie_word_embeddings": facts.boolean("tie_word_embeddings"),
        positions: longest,
        **{key: facts.config[key] for key in (*_TOKENS, "quantization_config") if facts.has(key)},
        **({"head_dim": facts.integer("head_dim")} if facts.has("head_dim") else {}),
        # The first InternLM is a Llama with biases in attention.
        **({"attention_bias": True} if network.startswith("InternLMFor") else {}),
    }


def _rotation(facts: Facts) -> tuple[float, dict[str, Any]]:
    """Base of the frequencies, and how they are stretched: by `extend_method` with its `scaling_factor`."""
    theta = facts.number("theta", 10000.0)
    method = facts.choice("extend_method", _EXTENSIONS, "None")
    if method == "None":
        return theta, {}
    if method == "NTK":
        return theta * facts.number("scaling_factor", 1.0), {}
    if method == "PI":
        return theta, {"rope_type": "linear", "factor": facts.number("scaling_factor", 1.0)}
    inner = facts.inner("scaling_factor")
    return theta, {**inner.config, "rope_type": method.lower(), "factor": inner.number("factor")}
