"""The tensors of a GGUF file under Hugging Face's names, and in its layout.

llama.cpp uses the same tensor names for every architecture. It stores some tensors in another layout:
    rows of query and key   `pairs`: the two rows that rotate together are neighbours; here they lie half a head apart
    norm weights            `plus_one`: the stored weight is the norm weight of the model plus 1
    experts                 one tensor of three dimensions for all experts of a layer; until 2024 one for each expert
    stacked projections     some files have one tensor for query, key and value
    latent keys, values     DeepSeek: two tensors with a matrix for each head; the matrices of the keys are transposed

Blocks keep their bytes: `StoredTensor.part` picks consecutive rows (experts, stacked projections), and
`PackedTensor.order` states the order of reordered rows. Only latent keys and values are dequantized.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.packed import PackedTensor, ReadableTensor
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import Array, StoredTensor, to_float32

FREQUENCIES: Final = "rope_freqs.weight"
SHORT_FREQUENCIES: Final = "rope_factors_short.weight"
LONG_FREQUENCIES: Final = "rope_factors_long.weight"
_NO_WEIGHTS: Final = (FREQUENCIES, SHORT_FREQUENCIES, LONG_FREQUENCIES)
"""Tensors that are not weights: divisors of the rotary frequencies, which `models.gguf` adds to the configuration."""

_LATENT_KEYS, _LATENT_VALUES = "attn_k_b", "attn_v_b"
_WHOLE: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
_ROTATED: Final = ("self_attn.q_proj", "self_attn.k_proj")
_QKV: Final = "|".join((*_ROTATED, "self_attn.v_proj"))
_OF_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": _QKV,
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS: Final[Mapping[str, str]] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_BLOCK_SPARSE: Final[Mapping[str, str]] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}


_CONVOLUTION: Final = "conv.conv"
_LFM2: Final[Mapping[str, str]] = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": _CONVOLUTION,
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}


def _shared(name: str) -> dict[str, str]:
    """Return the names of the projections of a shared expert."""
    return {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}


_CORRECTION: Final = "mlp.gate.e_score_correction_bias"
_ERNIE_CORRECTION: Final = "mlp.moe_statics.e_score_correction_bias"
_ONE_ROW: Final = ("shared_expert_gate", _ERNIE_CORRECTION)
"""Tensors that are vectors in GGUF and matrices of one row in Hugging Face's layout."""
_HUNYUAN: Final[Mapping[str, str]] = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_AFTER: Final[Mapping[str, str]] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA: Final[Mapping[str, str]] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Naming:
    """The names and layouts of an architecture.

    Attributes:
        more: Tensors of a layer that Llama lacks or names differently. `*` is the number of an expert; `|` separates
            the names of query, key and value that one tensor stacks.
        pairs, plus_one: Whether the file uses the layout of this name in the docstring of this module.
    """

    more: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    plus_one: bool = False


NAMINGS: Final[Mapping[str, Naming]] = {
    "llama": Naming(_BLOCK_SPARSE, pairs=True),
    "mistral3": Naming(pairs=True),
    "granite": Naming(pairs=True),
    "granitemoe": Naming(
        {
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_exps": "block_sparse_moe.experts.*.gate_proj",
            "ffn_up_exps": "block_sparse_moe.experts.*.up_proj",
            "ffn_down_exps": "block_sparse_moe.experts.*.down_proj",
        },
        pairs=True,
    ),
    "smollm3": Naming(pairs=True),
    "internlm2": Naming(pairs=True),
    "baichuan": Naming(pairs=True),
    "qwen2": Naming(),
    "qwen3": Naming(),
    "qwen2moe": Naming(
        {**_EXPERTS, "ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_shared("shared_expert")},
    ),
    "qwen3moe": Naming(_EXPERTS),
    "gemma": Naming(plus_one=True),
    "gemma2": Naming(_GEMMA, plus_one=True),
    "gemma3": Naming(_GEMMA, plus_one=True),
    "seed_oss": Naming({"post_attention_norm": "post_attention_layernorm"}),
    "olmo2": Naming(_AFTER),
    "lfm2": Naming(_LFM2),
    "lfm2moe": Naming(
        {
            **_LFM2,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b": "feed_forward.expert_bias",
            "ffn_gate_exps": "feed_forward.experts.*.w1",
            "ffn_up_exps": "feed_forward.experts.*.w3",
            "ffn_down_exps": "feed_forward.experts.*.w2",
        }
    ),
    "exaone4": Naming(_AFTER),
    "ernie4_5": Naming(),
    "ernie4_5-moe": Naming({**_EXPERTS, **_shared("shared_experts"), "exp_probs_b": _ERNIE_CORRECTION}),
    "hunyuan-dense": Naming(_HUNYUAN),
    "hunyuan-moe": Naming({**_HUNYUAN, **_EXPERTS, **_shared("shared_mlp"), "ffn_gate_inp": "mlp.gate.wg"}),
    "minimax-m2": Naming({**_BLOCK_SPARSE, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}),
    "gpt-oss": Naming(
        {
            **_EXPERTS,
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        }
    ),
    "command-r": Naming(),
    "cohere2": Naming(),
    "stablelm": Naming(),
    "starcoder2": Naming({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "phi3": Naming({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "chatglm": Naming({"ffn_up": "mlp.gate_up_proj"}),
    "glm4": Naming(
        {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
    ),
    "glm4moe": Naming(
        {
            **_EXPERTS,
            **_shared("shared_experts"),
            "exp_probs_b": _CORRECTION,
            "post_attention_norm": "post_attention_layernorm",
        }
    ),
    "deepseek2": Naming(
        {
            **_EXPERTS,
            **_shared("shared_experts"),
            "exp_probs_b": _CORRECTION,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            _LATENT_KEYS: "self_attn.kv_b_proj",
        }
    ),
}
"""`general.architecture` -> names and layouts."""

_NAME: Final = re.compile(
    r"^(?:blk\.(?P<layer>\d{1,6})\.)?(?P<role>(?:shortconv\.)?[a-z0-9_]+)(?:\.(?P<expert>\d{1,4}))?\.(?P<kind>weight|bias)$"
)
_PREDICTING: Final = re.compile(r"^blk\.(?=\d{1,6}\.nextn\.)")
"""Start of tensor names that only multi-token prediction layers have."""
_HUGGING_FACE_PREFIXES: Final = ("model.", "lm_head.")
"""Prefixes of Hugging Face's names. A GGUF file with such names is refused, because its rows would not be reordered."""


def named_weights(
    tensors: Mapping[str, ReadableTensor], architecture: str, heads: int, kv_heads: int
) -> dict[str, ReadableTensor]:
    """Return the tensors of a file with the names and layout of Hugging Face. Unknown names are kept. `architecture` is
    a key of `NAMINGS`. Raise ModelError if two tensors get one name, or the shape of a tensor does not fit the numbers
    of heads.
    """
    naming = NAMINGS[architecture]
    weights: dict[str, ReadableTensor] = {}
    for name, tensor in tensors.items():
        if name in _NO_WEIGHTS or _is_latent_values(name, tensors):
            continue
        for known, weight in _named(name, tensor, tensors, naming, _Heads(heads, kv_heads)):
            if known == name and name.startswith(_HUGGING_FACE_PREFIXES):
                raise ModelError(f"{tensor.file}: tensor {name} must have a name of llama.cpp (blk.0.attn_q.weight)")
            if known in weights:
                raise ModelError(f"{tensor.file}: tensor {name} occurs twice, as {known}")
            weights[known] = weight
    return weights


class _Heads(NamedTuple):
    q: int
    kv: int


def _is_latent_values(name: str, tensors: Mapping[str, ReadableTensor]) -> bool:
    return _LATENT_VALUES in name and name.replace(_LATENT_VALUES, _LATENT_KEYS) in tensors


def _named(
    name: str, tensor: ReadableTensor, tensors: Mapping[str, ReadableTensor], naming: Naming, heads: _Heads
) -> Iterator[tuple[str, ReadableTensor]]:
    match = _NAME.match(name)
    expert = None if match is None else match["expert"]
    role = "" if match is None else match["role"] if expert is None else f"{match['role']}_exps"
    known = match and ({**_OF_LAYER, **naming.more} if match["layer"] else _WHOLE).get(role)
    if match is None or known is None:
        yield _PREDICTING.sub("model.layers.", name), tensor
        return
    prefix, ending = f"model.layers.{int(match['layer'])}." if match["layer"] else "", match["kind"]
    if role == _LATENT_KEYS:
        tensor = _joined_latents(name, tensor, tensors.get(name.replace(role, _LATENT_VALUES)), heads.q)
    if "*" not in known or expert is not None:
        experts = {int(expert or 0): tensor}
    else:
        experts = dict(enumerate(_experts(name, tensor)))
    for number, part in experts.items():
        for each, weight in _apart(name, known.replace("*", str(number)), part, heads):
            full = each if each.endswith((f"_{ending}", ".sinks")) else f"{each}.{ending}"
            yield f"{prefix}{full}", _in_layout(name, each, weight, naming, heads)


def _apart(name: str, known: str, tensor: ReadableTensor, heads: _Heads) -> list[tuple[str, ReadableTensor]]:
    """Return the weights that are stacked in a tensor, by their names."""
    names = known.split("|")
    if len(names) == 1:
        return [(known, tensor)]
    counts = (heads.q, heads.kv, heads.kv)
    own = _head_rows(name, tensor, sum(counts))
    starts = itertools.accumulate(counts, initial=0)
    return [
        (each, _rows(tensor, start * own, (count * own, *tensor.shape[1:])))
        for each, start, count in zip(names, starts, counts, strict=False)
    ]


def _in_layout(name: str, known: str, tensor: ReadableTensor, naming: Naming, heads: _Heads) -> ReadableTensor:
    if naming.pairs and known in _ROTATED:
        return _with_split_pairs(name, tensor, heads.q if known == _ROTATED[0] else heads.kv)
    if naming.plus_one and known.endswith("norm") and isinstance(tensor, StoredTensor):
        return PackedTensor(name, tensor.shape, {"values": tensor}, _less_one)
    if known == _CONVOLUTION and len(tensor.shape) == 2 and isinstance(tensor, StoredTensor):
        return replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
    if known.endswith(_ONE_ROW) and len(tensor.shape) == 1 and isinstance(tensor, StoredTensor):
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor


def _head_rows(name: str, tensor: ReadableTensor, heads: int, multiple: int = 1) -> int:
    if not heads or tensor.shape[0] % (multiple * heads):
        raise ModelError(f"{tensor.file}: tensor {name} must have rows of {heads} heads. Found: {tensor.shape[0]}")
    return tensor.shape[0] // heads


def _with_split_pairs(name: str, tensor: ReadableTensor, heads: int) -> ReadableTensor:
    _head_rows(name, tensor, heads, 2)
    order = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if isinstance(tensor, PackedTensor):
        return replace(tensor, order=order)
    return PackedTensor(name, tensor.shape, {"rows": tensor}, lambda arrays: arrays["rows"], order)


def _experts(name: str, tensor: ReadableTensor) -> Iterator[ReadableTensor]:
    dimensions = 2 if name.endswith(".bias") else 3
    if len(tensor.shape) != dimensions:
        raise ModelError(f"{tensor.file}: tensor {name} must have {dimensions} dimensions. Found: {list(tensor.shape)}")
    if dimensions == 2 and not isinstance(tensor, StoredTensor):
        raise ModelError(f"{tensor.file}: tensor {name} must not be block-quantized")
    count, rows = tensor.shape[:2]
    return (_rows(tensor, number * rows, tensor.shape[1:]) for number in range(count))


def _rows(tensor: ReadableTensor, start: int, shape: tuple[int, ...]) -> ReadableTensor:
    """Return consecutive rows of a tensor; the last dimension counts columns, except that of a vector."""
    if isinstance(tensor, StoredTensor):
        return tensor.part(start * (shape[-1] if len(shape) > 1 else 1), shape)
    stored = {
        ending: part.part(start * part.shape[-1], (shape[0], part.shape[-1])) for ending, part in tensor.stored.items()
    }
    return replace(tensor, shape=shape, stored=stored)


def _less_one(arrays: Mapping[str, Array]) -> Array:
    values: Array = to_float32(arrays["values"]) - np.float32(1)
    return values


def _joined_latents(name: str, keys: ReadableTensor, values: ReadableTensor | None, heads: int) -> PackedTensor:
    """[heads, rank, n] keys and [heads, v, rank] values -> kv_b_proj [heads * (n + v), rank].

    Each head has n rows of keys, then v rows of values. A file may also store heads and rows as one dimension.
    """
    if values is None:
        raise ModelError(f"{keys.file}: tensor {name} must have {_LATENT_VALUES} beside it")
    rank = values.shape[-1]
    num_keys, num_rows = keys.shape[-1], int(np.prod(values.shape[:-1]))
    if not heads or num_rows % heads or int(np.prod(keys.shape[:-1])) != heads * rank:
        raise ModelError(
            f"{keys.file}: tensor {name} must have {heads} matrices of {rank} rows. Found: {list(keys.shape)}"
        )
    stored: dict[str, StoredTensor] = {}
    for each, tensor in (("keys", keys), ("values", values)):
        parts = {"": tensor} if isinstance(tensor, StoredTensor) else tensor.stored
        stored |= {f"{each}.{ending}": part for ending, part in parts.items()}

    def unpack(arrays: Mapping[str, Array]) -> Array:
        k = _elements("keys", keys, arrays).reshape(heads, rank, num_keys).swapaxes(1, 2)
        v = _elements("values", values, arrays).reshape(heads, -1, rank)
        joined: Array = np.concatenate([k, v], axis=1).reshape(-1, rank)
        return joined

    return PackedTensor(name, (heads * num_keys + num_rows, rank), stored, unpack)


def _elements(which: str, tensor: ReadableTensor, arrays: Mapping[str, Any]) -> Array:
    own = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{which}.")}
    if isinstance(tensor, StoredTensor):
        return to_float32(own[""])
    found = tensor.unpack(own)
    assert not isinstance(found, QuantizedTensor)
    return found if isinstance(found, np.ndarray) else found.dequantized()
