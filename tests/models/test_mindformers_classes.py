import pytest
from families import models
from llm_serving.models.mindformers import (
    mindformers_parameter,
    unsupported_by_mindformers,
    unsupported_by_mindformers_llama,
    without_key_offsets,
)
from llm_serving.models.mindformers_latent import joined_caches, with_latent_weights
from llm_serving.models.spec import ModelSpec

WIDER = {"qwen2": {"hidden_size": 96}, "qwen2-tied": {"hidden_size": 96}}
"""Changes that give the heads of these models 16 elements."""
SERVED = {
    "llama2",
    "llama3.1",
    "llama-yarn-told",
    "qwen3",
    "qwen3-tied",
    "qwen3-moe",
    "glm4",
    "glm4-moe",
    "deepseek-v3-wide",
    *WIDER,
}


def spec_of(name, **changes):
    return ModelSpec.from_hugging_face(models.model(name).config | changes)


@pytest.mark.parametrize("name", sorted(SERVED))
def test_mindformers_parameters_are_unique_for_each_weight(name):
    spec = spec_of(name, **WIDER.get(name, {}))
    assert unsupported_by_mindformers(spec.architecture, spec.network, 256) is None
    weights = with_latent_weights(without_key_offsets(spec.network)).weights
    names = [mindformers_parameter(weight) for weight in weights if weight.generate is None]
    assert None not in names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "glm",
            "GlmForCausalLM has no class of MindFormers 2.1 that is served; LlamaForCausalLM, ",
        ),
        ("mistral", "MistralForCausalLM has no class"),
    ],
)
def test_unsupported_by_mindformers_names_the_family(name, reason):
    spec = spec_of(name)
    assert unsupported_by_mindformers(spec.architecture, spec.network, 256).startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 256}, "has latent vectors of 512 elements; those of the model have 256"),
        ({"rms_norm_eps": 1e-5}, "normalises latent vectors with rms_norm_eps, and the model with 1e-06"),
        (
            {"v_head_dim": 12},
            "takes heads as they are stored, of a multiple of 16 elements: model.layers.0.self_attn.k",
        ),
        ({"norm_topk_prob": False}, "always normalises the weights of experts that it chooses in groups"),
        (
            {"n_routed_experts": 64},
            "chooses experts in 8 groups of at most 32, or at most 32 experts; the model has 64",
        ),
    ],
)
def test_latent_attention_that_the_class_of_mindformers_lacks_is_refused(changes, reason):
    spec = spec_of("deepseek-v3-wide", **changes)
    found = unsupported_by_mindformers(spec.architecture, spec.network, 256)
    assert found is not None
    assert found.startswith(f"MindFormers' class {reason}")


def test_experts_without_limits_of_groups_need_no_fused_operator():
    spec = spec_of("deepseek-v3-wide", n_group=1, topk_group=1, n_routed_experts=64, norm_topk_prob=False)
    assert unsupported_by_mindformers(spec.architecture, spec.network, 256) is None


def test_latent_attention_of_a_single_head_is_supported():
    spec = spec_of("deepseek-v3-wide", num_attention_heads=1)
    assert unsupported_by_mindformers(spec.architecture, spec.network, 256) is None
    read = with_latent_weights(without_key_offsets(spec.network))
    assert {name for weight in read.weights for name in weight.names} == set(spec.tensors)


@pytest.mark.parametrize("q_lora_rank", [None, 40])
def test_weights_of_latent_attention_are_those_of_the_model(q_lora_rank):
    spec = spec_of("deepseek-v3-wide", q_lora_rank=q_lora_rank)
    read = with_latent_weights(without_key_offsets(spec.network))
    assert {name for weight in read.weights for name in weight.names} == set(spec.tensors)
    shapes = {mindformers_parameter(weight): weight.shape for weight in read.weights if weight.generate is None}
    at = "decoder.layers.0.self_attention."
    down = "linear_qkv_down_proj" if q_lora_rank else "linear_kv_down_proj"
    assert shapes[f"{at}{down}.weight"] == (576 + (q_lora_rank or 0), 64)
    assert shapes[f"{at}q_absorb"] == (2 * 512, 16)
    assert shapes[f"{at}out_absorb"] == (2 * 16, 512)
    transposed = with_latent_weights(without_key_offsets(spec.network), transposed_values=True)
    shapes = {mindformers_parameter(weight): weight.shape for weight in transposed.weights if weight.generate is None}
    assert shapes[f"{at}out_absorb"] == (2 * 512, 16)


def test_cache_of_mindformers_has_latent_keys_in_one_tensor():
    spec = spec_of("deepseek-v3-wide")
    joined = spec.of_mindformers()
    assert {(each.kv_heads, each.key_width, each.value_width) for each in joined.caches} == {(1, 576, 0)}
    assert joined.kv_bytes_per_token(2) == spec.kv_bytes_per_token(2)
    assert joined.head_dims == {576}
    assert joined_caches(joined.network) == list(joined.caches)
    assert spec_of("qwen3").of_mindformers().caches == spec_of("qwen3").caches


def test_unsupported_by_mindformers_names_the_feature():
    config = models.model("llama2").config
    biased = ModelSpec.from_hugging_face(config | {"mlp_bias": True})
    reason = unsupported_by_mindformers(biased.architecture, biased.network, 256)
    assert reason == "MindFormers' class has no parameter for model.layers.0.mlp.gate_proj.bias"
    windows = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    spec = ModelSpec.from_hugging_face(models.model("qwen3").config | windows)
    reason = unsupported_by_mindformers(spec.architecture, spec.network, 256)
    assert reason == "MindFormers' class has no attention with a window of 32 tokens"
    assert unsupported_by_mindformers(spec.architecture, spec.network, 32) is None


def test_unsupported_by_mindformers_refuses_layers_without_experts():
    spec = spec_of("qwen3-moe-mixed")
    reason = unsupported_by_mindformers(spec.architecture, spec.network, 256)
    assert reason == "MindFormers' class has no layers without experts"


def test_unsupported_by_mindformers_refuses_groups_with_other_scores_than_the_model():
    spec = spec_of("glm4-moe-groups")
    reason = unsupported_by_mindformers(spec.architecture, spec.network, 256)
    assert reason == "MindFormers' class scores a group of experts by its best 1, and the model by its best 2"
    for top_k in (4, 5):  # the best 2 of each of 2 groups: the quotient is rounded down
        spec = spec_of("glm4-moe-groups", n_routed_experts=16, num_experts_per_tok=top_k)
        assert unsupported_by_mindformers(spec.architecture, spec.network, 256) is None


def test_unsupported_by_mindformers_refuses_a_normalised_single_expert():
    spec = spec_of("qwen3-moe", num_experts_per_tok=1, norm_topk_prob=True)
    reason = unsupported_by_mindformers(spec.architecture, spec.network, 256)
    assert reason == "MindFormers' class does not normalise the weight of a single expert"


def test_mindformers_llama_supports_attention_biases():
    spec = spec_of("llama2", attention_bias=True)
    assert len(without_key_offsets(spec.network).weights) < len(spec.network.weights)
    assert unsupported_by_mindformers_llama(spec.architecture, spec.network, 256) is None


def test_unsupported_by_mindformers_refuses_padded_heads():
    spec = spec_of("qwen2")  # its heads have 12 elements
    reason = unsupported_by_mindformers(spec.architecture, spec.network, 256)
    assert reason is not None
    assert reason.startswith(
        "MindFormers' class takes heads as they are stored, of a multiple of 16 elements: model.lay"
    )
