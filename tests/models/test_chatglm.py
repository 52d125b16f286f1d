"""The older layout of GLM-4 is the GLM network with other names."""

import pytest
from families import models
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec

GLM = models.model("glm").config
OLDER = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "ffn_hidden_size": GLM["intermediate_size"],
    "hidden_size": GLM["hidden_size"],
    "kv_channels": GLM["head_dim"],
    "layernorm_epsilon": GLM["rms_norm_eps"],
    "multi_query_attention": True,
    "multi_query_group_num": GLM["num_key_value_heads"],
    "num_attention_heads": GLM["num_attention_heads"],
    "num_layers": GLM["num_hidden_layers"],
    "padded_vocab_size": GLM["vocab_size"],
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": GLM["rope_theta"] / 10000,
    "seq_length": GLM["max_position_embeddings"],
    "tie_word_embeddings": False,
    "eos_token_id": GLM["eos_token_id"],
    "pad_token_id": GLM["pad_token_id"],
}


def shape_of(spec: ModelSpec) -> list[object]:
    """Return everything of a network except the names of tensors."""
    operations = spec.network.operations
    weights = [
        (role, each.shape, each.rows, each.columns, each.dtype)
        for op in operations
        for role, each in op.weights.items()
    ]
    return [
        [(op.kind, op.attributes, list(op.inputs), list(op.outputs)) for op in operations],
        weights,
        spec.network.rotaries,
        spec.caches,
    ]


def test_chatglm_network_equals_that_of_glm() -> None:
    older, newer = ModelSpec.from_hugging_face(OLDER), ModelSpec.from_hugging_face(GLM)
    assert shape_of(older) == shape_of(newer)
    names = ("vocab_size", "max_position_embeddings", "eos_token_ids", "pad_token_id", "num_parameters")
    assert [getattr(older, fact) for fact in names] == [getattr(newer, fact) for fact in names]


def test_chatglm_norms_have_the_default_epsilon_of_the_class() -> None:
    nothing = {key: value for key, value in OLDER.items() if key != "layernorm_epsilon"}
    default, explicit, other = map(ModelSpec.from_hugging_face, (nothing, OLDER | {"layernorm_epsilon": 1e-5}, GLM))
    assert shape_of(default) == shape_of(explicit) != shape_of(other)


def test_chatglm_tensors_have_the_published_names() -> None:
    at = "transformer.encoder.layers.0."
    names = {name.removeprefix(at) for name in ModelSpec.from_hugging_face(OLDER).tensors if name.startswith(at)}
    assert names == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attention.query_key_value.weight",
        "self_attention.query_key_value.bias",
        "self_attention.dense.weight",
        "mlp.dense_h_to_4h.weight",
        "mlp.dense_4h_to_h.weight",
    }
    others = {name for name in ModelSpec.from_hugging_face(OLDER).tensors if "layers" not in name}
    assert others == {
        "transformer.embedding.word_embeddings.weight",
        "transformer.encoder.final_layernorm.weight",
        "transformer.output_layer.weight",
    }


def test_chatglm_rope_ratio_scales_theta() -> None:
    spec = ModelSpec.from_hugging_face(OLDER | {"rope_ratio": 500})
    assert {each.theta for each in spec.network.rotaries} == {5e6}


@pytest.mark.parametrize(("key", "value"), [("rmsnorm", False), ("add_bias_linear", True)])
def test_chatglm_refuses_unsupported_options(key: str, value: bool) -> None:
    with pytest.raises(ModelError, match=f"`{key}` must be"):
        ModelSpec.from_hugging_face(OLDER | {key: value})
