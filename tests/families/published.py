"""InternLM2 and Baichuan2 in torch, as the architectures are published; `transformers` has neither.

One forward without a cache, float32. RMSNorm: Zhang and Sennrich 2019; rotary embedding in halves: Su et al. 2021;
SwiGLU: Shazeer 2020; linear biases: Press et al. 2021. InternLM2 stores, for each key head, the queries that share it,
then the key, then the value; where the text is longer than `max_position_embeddings`, "dynamic" raises the base by
(factor * length / maximum - (factor - 1)) ** (size / (size - 2)). Baichuan2 divides each row of the head by its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Tensors = dict[str, Tensor]
Split = Callable[[Tensor, int, int, int], tuple[Tensor, Tensor, Tensor]]
"""(joined, query heads, key heads, head size) -> query, key and value, [num_tokens, heads, size]."""


def grouped(qkv: Tensor, heads: int, kv_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = qkv.unflatten(-1, (kv_heads, heads // kv_heads + 2, size))
    return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]


def stacked(qkv: Tensor, heads: int, kv_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    return q.unflatten(-1, (heads, size)), k.unflatten(-1, (kv_heads, size)), v.unflatten(-1, (kv_heads, size))


@dataclass(frozen=True)
class Names:
    """Tensor names, without `.weight`."""

    table: str
    head: str
    before_attention: str
    before_mlp: str
    qkv: str
    out: str
    gate: str
    up: str
    down: str


INTERNLM2 = Names(
    table="model.tok_embeddings", head="output", before_attention="attention_norm", before_mlp="ffn_norm",
    qkv="attention.wqkv", out="attention.wo", gate="feed_forward.w1", up="feed_forward.w3", down="feed_forward.w2",
)  # fmt: skip
BAICHUAN2 = Names(
    table="model.embed_tokens", head="lm_head", before_attention="input_layernorm",
    before_mlp="post_attention_layernorm", qkv="self_attn.W_pack", out="self_attn.o_proj", gate="mlp.gate_proj",
    up="mlp.up_proj", down="mlp.down_proj",
)  # fmt: skip


def is_published(config: dict[str, Any]) -> bool:
    return config["architectures"][0] in ("InternLM2ForCausalLM", "BaichuanForCausalLM")


def logits(config: dict[str, Any], tensors: Tensors, ids: Tensor) -> Tensor:
    """[num_tokens] -> [num_tokens, vocab_size]."""
    if config["architectures"][0] == "InternLM2ForCausalLM":
        turns, biases = rotary(config, len(ids)), None
        hidden = decoded(config, tensors, ids, INTERNLM2, grouped, turns, biases)
        return hidden @ tensors["output.weight"].T
    if "max_position_embeddings" in config:
        turns, biases = rotary(config, len(ids)), None
    else:
        turns, biases = None, linear_biases(config["num_attention_heads"], len(ids))
    hidden = decoded(config, tensors, ids, BAICHUAN2, stacked, turns, biases)
    return hidden @ functional.normalize(tensors["lm_head.weight"]).T


def decoded(
    c: dict[str, Any], tensors: Tensors, ids: Tensor, names: Names, split: Split, turns: Tensor | None,
    biases: Tensor | None,
) -> Tensor:  # fmt: skip
    """Hidden states after the last norm.

    Args:
        turns: [num_tokens, size / 2], complex, or None without rotary embedding.
        biases: [heads, num_tokens, num_tokens], added to scores.
    """
    heads = c["num_attention_heads"]
    kv_heads, size = c.get("num_key_value_heads", heads), c["hidden_size"] // heads
    unseen = torch.full((len(ids), len(ids)), -torch.inf).triu(1)

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), tensors[f"{name}.weight"], c["rms_norm_eps"])

    hidden = tensors[f"{names.table}.weight"][ids]
    for index in range(c["num_hidden_layers"]):
        at = f"model.layers.{index}."
        qkv = linear(at + names.qkv, norm(at + names.before_attention, hidden))
        q, k, v = (part.transpose(0, 1) for part in split(qkv, heads, kv_heads, size))
        if turns is not None:
            q, k = turned(q, turns), turned(k, turns)
        k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * size**-0.5 + unseen
        attended = (scores if biases is None else scores + biases).softmax(dim=-1) @ v
        hidden = hidden + linear(at + names.out, attended.transpose(0, 1).flatten(1))
        x = norm(at + names.before_mlp, hidden)
        gated = functional.silu(linear(at + names.gate, x)) * linear(at + names.up, x)
        hidden = hidden + linear(at + names.down, gated)
    return norm("model.norm", hidden)


def rotary(c: dict[str, Any], length: int) -> Tensor:
    """[length, size / 2]: complex factor of each pair at each position."""
    size, base = c["hidden_size"] // c["num_attention_heads"], float(c.get("rope_theta", 10000.0))
    scaling, most = c.get("rope_scaling") or {}, c["max_position_embeddings"]
    if scaling.get("type") == "dynamic" and length > most:
        factor = scaling["factor"]
        base *= (factor * length / most - (factor - 1)) ** (size / (size - 2))
    frequencies = 1.0 / base ** (torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """The first half of a head has real parts, the second imaginary ones."""
    pairs = torch.complex(*x.chunk(2, dim=-1)) * turns
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def linear_biases(heads: int, length: int) -> Tensor:
    """[heads, length, length]: ALiBi biases, distance times slope; larger for closer tokens."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return -torch.tensor(slopes(heads))[:, None, None] * distance


def slopes(heads: int) -> list[float]:
    """Powers of 2^(-8 / n), n the power of two below; the others are every second one of twice as many."""
    whole = 1 << (heads.bit_length() - 1)
    listed = [2.0 ** (-8 * (index + 1) / whole) for index in range(whole)]
    return (listed + [2.0 ** (-4 * (index + 1) / whole) for index in range(0, 2 * whole, 2)])[:heads]
