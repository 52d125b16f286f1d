"""MindFormers' tensor names, and the names of its fused projections.

Llama and Qwen2 have names of their own. Newer networks, such as Qwen3, have the names of Megatron Core.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

_NAMES: Final = (
    ("tok_embeddings.embedding_weight", "embed_tokens.weight"),
    (".attention.wq.", ".self_attn.q_proj."),
    (".attention.wk.", ".self_attn.k_proj."),
    (".attention.wv.", ".self_attn.v_proj."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("model.norm_out.", "model.norm."),
)
"""(part of MindFormers' name, part of Hugging Face's name), in the order of replacement."""

_CORE: Final = (
    ("embedding.word_embeddings.", "model.embed_tokens."),
    ("decoder.final_layernorm.", "model.norm."),
    ("decoder.layers.", "model.layers."),
    ("output_layer.", "lm_head."),
    (".self_attention.linear_q.", ".self_attn.q_proj."),
    (".self_attention.linear_k.", ".self_attn.k_proj."),
    (".self_attention.linear_v.", ".self_attn.v_proj."),
    (".self_attention.linear_proj.", ".self_attn.o_proj."),
    (".self_attention.q_layernorm.", ".self_attn.q_norm."),
    (".self_attention.k_layernorm.", ".self_attn.k_norm."),
    (".mlp.gating.", ".mlp.gate_proj."),
    (".mlp.hidden.", ".mlp.up_proj."),
    (".mlp.linear_fc2.", ".mlp.down_proj."),
    (".pre_mlp_layernorm.", ".post_attention_layernorm."),
)
_CORE_NAME: Final = re.compile(r"^(embedding\.word_embeddings|decoder\.(layers|final_layernorm)|output_layer)\.")

QKV: Final = re.compile(r"^(?P<at>.*)\.(attention\.w_qkv|self_attention\.linear_qkv)\.(?P<kind>weight|bias)$")
GATE_UP: Final = re.compile(r"^(?P<at>.*)\.(feed_forward\.w_gate_hidden|mlp\.linear_fc1)\.(?P<kind>weight|bias)$")

Order = Literal["grouped", "stacked"]
"""The row order of fused projections. Neither files nor tensor names specify it.

`grouped` (`w_qkv` of MindFormers 1.4 and newer, `linear_qkv` of its training networks): for each KV head, its query
heads, its key and its value; rows of gate and up alternate. `stacked` (`w_qkv` of older releases, `linear_qkv` of
inference networks): one projection after another.
"""
ORDERS: Final = ("grouped", "stacked")


def are_of_mindformers(names: Iterable[str]) -> bool:
    """Return whether one of these tensor names occurs only in MindFormers."""
    own = ("tok_embeddings.embedding_weight", ".attention.wq.", ".attention.w_qkv.", ".feed_forward.w_gate_hidden.")
    return any(_CORE_NAME.match(name) or any(part in name for part in own) for name in names)


def hugging_face_name(name: str) -> str:
    for theirs, ours in _CORE if _CORE_NAME.match(name) else _NAMES:
        name = name.replace(theirs, ours)
    return name


def mindformers_name(name: str) -> str:
    for theirs, ours in _NAMES:
        name = name.replace(ours, theirs)
    return name


def is_fused(name: str) -> bool:
    return QKV.match(name) is not None or GATE_UP.match(name) is not None
