"""What MindFormers' classes compute, said of every family before a weight is read."""

import pytest
from families import models
from llm_serving.models.mindformers import lacking_in_mindformers, place_of
from llm_serving.models.spec import ModelSpec

SERVED = {"llama2", "llama3.1", "llama-yarn-told", "qwen3", "qwen3-tied", "glm4"}


def spec_of(name):
    return ModelSpec.from_hugging_face(models.model(name).config)


@pytest.mark.parametrize("name", sorted(SERVED))
def test_every_weight_of_a_family_with_a_class_has_a_place_of_its_own(name):
    spec = spec_of(name)
    assert lacking_in_mindformers(spec.architecture, spec.network, 256) is None
    places = [place_of(weight) for weight in spec.network.weights if weight.made is None]
    assert None not in places
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "glm",
            "GlmForCausalLM has no class of MindFormers 2.1 that is served; LlamaForCausalLM, ",
        ),
        (
            "qwen3-moe",
            "Qwen3MoeForCausalLM has no class of MindFormers 2.1 that is served",
        ),
        ("mistral", "MistralForCausalLM has no class"),
    ],
)
def test_a_family_without_a_class_is_refused_by_name(name, reason):
    spec = spec_of(name)
    assert lacking_in_mindformers(spec.architecture, spec.network, 256).startswith(reason)


def test_what_a_class_leaves_out_is_named():
    config = models.model("llama2").config
    biased = ModelSpec.from_hugging_face(config | {"mlp_bias": True})
    told = lacking_in_mindformers(biased.architecture, biased.network, 256)
    assert told == "MindFormers' class has no place for model.layers.0.mlp.gate_proj.bias"
    windows = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    spec = ModelSpec.from_hugging_face(models.model("qwen3").config | windows)
    told = lacking_in_mindformers(spec.architecture, spec.network, 256)
    assert told == "MindFormers' class has no attention with a window of 32 tokens"
    assert lacking_in_mindformers(spec.architecture, spec.network, 32) is None


def test_heads_that_are_stored_in_another_order_than_they_are_cached_are_refused():
    spec = spec_of("qwen2")  # its heads have 12 elements
    told = lacking_in_mindformers(spec.architecture, spec.network, 256)
    assert told is not None
    assert told.startswith("MindFormers' class takes heads as they are stored, of a multiple of 16 elements: model.lay")
