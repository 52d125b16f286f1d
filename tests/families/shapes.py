"""Names and shapes of the tensors in published folders, composed of parts that families share.

Every function returns name -> shape (rows, columns). Prefixes end with a dot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


def decoder(
    c: Config, layer: Callable[[int], Shapes], *, table: str = "model.embed_tokens", head: str = "lm_head",
    tied: bool | None = None,
) -> Shapes:  # fmt: skip
    """Token embedding, the tensors of each layer from `layer`, last norm and, if it is not tied, the LM head."""
    shapes = {f"{table}.weight": (c["vocab_size"], c["hidden_size"])}
    for index in range(c["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer(index).items()}
    shapes["model.norm.weight"] = (c["hidden_size"],)
    if not (c.get("tie_word_embeddings", False) if tied is None else tied):
        shapes[f"{head}.weight"] = (c["vocab_size"], c["hidden_size"])
    return shapes


def linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def norms(c: Config, *names: str) -> Shapes:
    return {f"{name}.weight": (c["hidden_size"],) for name in names}


def head_size(c: Config) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def attention(
    c: Config, *, bias: bool = False, out_bias: bool = False, joined: str = "", head_norms: bool = False,
    whole_norms: bool = False, norm_names: tuple[str, str] = ("q_norm", "k_norm"),
    at: str = "self_attn.", out: str = "o_proj",
) -> Shapes:  # fmt: skip
    """Query, key and value, separate or fused in a tensor `joined`, and the output projection.

    Args:
        head_norms: Whether each head of queries and keys has a norm.
        whole_norms: Whether queries and keys have norms over all heads.
    """
    size = head_size(c)
    q = c["num_attention_heads"] * size
    kv = c.get("num_key_value_heads", c["num_attention_heads"]) * size
    rows = {joined: q + 2 * kv} if joined else {"q_proj": q, "k_proj": kv, "v_proj": kv}
    shapes: Shapes = {}
    for name, count in rows.items():
        shapes |= linear(at + name, count, c["hidden_size"], bias)
    if head_norms or whole_norms:
        sizes = (q, kv) if whole_norms else (size, size)
        shapes |= {f"{at}{name}.weight": (each,) for name, each in zip(norm_names, sizes, strict=True)}
    return shapes | linear(at + out, c["hidden_size"], q, out_bias)


def mlp(
    c: Config, inner: int | None = None, *, at: str = "mlp.", bias: bool = False, joined: str = "",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Shapes:  # fmt: skip
    """Gate and up, separate or fused in a tensor `joined`, and down."""
    hidden, inner = c["hidden_size"], inner or c["intermediate_size"]
    gate, up, down = names
    if joined:
        above = linear(at + joined, 2 * inner, hidden, bias)
    else:
        above = linear(at + gate, inner, hidden, bias) | linear(at + up, inner, hidden, bias)
    return above | linear(at + down, hidden, inner, bias)


def experts(
    c: Config, count: int, inner: int, *, at: str = "mlp.", router: str = "gate",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Shapes:  # fmt: skip
    """The router, and gate, up and down of each expert."""
    shapes = linear(at + router, count, c["hidden_size"])
    for index in range(count):
        shapes |= mlp(c, inner, at=f"{at}experts.{index}.", names=names)
    return shapes
