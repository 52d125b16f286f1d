import pytest
from families import models
from llm_serving.models.mindformers import (
    mindformers_parameter,
    unsupported_by_mindformers,
    unsupported_by_mindformers_llama,
    without_key_offsets,
)
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
    *WIDER,
}


def spec_of(name, **changes):
    return ModelSpec.from_hugging_face(models.model(name).config | changes)


@pytest.mark.parametrize("name", sorted(SERVED))
def test_mindformers_parameters_are_unique_for_each_weight(name):
    spec = spec_of(name, **WIDER.get(name, {}))
    assert unsupported_by_mindformers(spec.architecture, spec.network, 256) is None
    weights = without_key_offsets(spec.network).weights
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


def test_a_class_that_is_not_served_is_refused_by_its_own_name():
    reason = unsupported_by_mindformers("DeepseekV3ForCausalLM", spec_of("qwen3").network, 256)
    assert reason.startswith("MindFormers' InferenceDeepseekV3ForCausalLM is not served: it ")


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


def test_unsupported_by_mindformers_refuses_groups_of_experts():
    spec = spec_of("glm4-moe-groups")
    reason = unsupported_by_mindformers(spec.architecture, spec.network, 256)
    assert reason == "MindFormers' class chooses experts in groups by operations that MindSpore lacks on a CPU"


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
