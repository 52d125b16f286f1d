import numpy as np
import pytest
from llm_serving.formats.mindformers_names import (
    are_of_mindformers,
    hugging_face_name,
    is_fused,
    mindformers_name,
)
from llm_serving_tools.fused_projections import split
from support.small_model import small_tensors

HEADS, KV_HEADS, SIZE, HIDDEN = 4, 2, 3, 5
Q = np.arange(HEADS * SIZE * HIDDEN).reshape(-1, HIDDEN)
K = 1000 + np.arange(KV_HEADS * SIZE * HIDDEN).reshape(-1, HIDDEN)
V = 2000 + K
AT = "model.layers.0"


def grouped_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return a fused projection in the order of MindFormers: [key heads, (heads of a group + 2) * size]."""
    parts = []
    group = HEADS // KV_HEADS * SIZE
    for index in range(KV_HEADS):
        parts += [q[index * group :][:group], k[index * SIZE :][:SIZE], v[index * SIZE :][:SIZE]]
    return np.concatenate(parts)


@pytest.mark.parametrize("columns", [HIDDEN, None])
@pytest.mark.parametrize("order", ["grouped", "stacked"])
def test_fused_qkv_is_split_into_projections(order, columns):
    kind, pick = ("weight", slice(None)) if columns else ("bias", 0)
    q, k, v = (each[:, pick] for each in (Q, K, V))
    joined = grouped_qkv(q, k, v) if order == "grouped" else np.concatenate([q, k, v])
    parts = split(f"{AT}.attention.w_qkv.{kind}", joined, order, HEADS, KV_HEADS)
    assert list(parts) == [f"{AT}.self_attn.{name}_proj.{kind}" for name in "qkv"]
    for found, expected in zip(parts.values(), (q, k, v), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("order", ["grouped", "stacked"])
def test_fused_gate_up_is_split_into_projections(order):
    gate, up = Q, 500 + Q
    joined = np.stack([gate, up], 1).reshape(-1, HIDDEN) if order == "grouped" else np.concatenate([gate, up])
    parts = split(f"{AT}.feed_forward.w_gate_hidden.weight", joined, order, HEADS, KV_HEADS)
    assert list(parts) == [f"{AT}.mlp.gate_proj.weight", f"{AT}.mlp.up_proj.weight"]
    assert [each.tolist() for each in parts.values()] == [gate.tolist(), up.tolist()]


def test_mindformers_names_round_trip():
    names = list(small_tensors())
    theirs = [mindformers_name(name) for name in names]
    assert [hugging_face_name(name) for name in theirs] == names
    assert not set(theirs) & set(names) - {"lm_head.weight"}
    assert "model.tok_embeddings.embedding_weight" in theirs
    assert "model.layers.1.feed_forward.w2.weight" in theirs
    assert "model.norm_out.weight" in theirs
    assert not any(is_fused(name) for name in theirs)


def test_mindformers_core_names_map_to_hugging_face_names():
    names = ("linear_q", "linear_k", "linear_v", "linear_proj", "q_layernorm", "k_layernorm")
    found = [hugging_face_name(f"decoder.layers.3.self_attention.{name}.weight") for name in names]
    ours = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    assert found == [f"model.layers.3.self_attn.{name}.weight" for name in ours]
    assert hugging_face_name("decoder.layers.0.mlp.gating.weight") == "model.layers.0.mlp.gate_proj.weight"
    assert hugging_face_name("decoder.layers.0.mlp.hidden.weight") == "model.layers.0.mlp.up_proj.weight"
    assert are_of_mindformers(["embedding.word_embeddings.weight"])
    older_glm = ["transformer.embedding.word_embeddings.weight", "transformer.output_layer.weight"]
    assert not are_of_mindformers([*older_glm, "transformer.encoder.layers.0.self_attention.dense.weight"])
