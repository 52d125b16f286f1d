"""Each family starts on Ascend (`ascend.models`), or is refused with what Ascend lacks. Encoders are refused because
their attention is not causal.
"""

import json

import pytest
from ascend.models import FAMILIES, MORE_FAMILIES, family_config
from families import models
from llm_serving.models.registry import architecture_of
from llm_serving.models.spec import ModelSpec
from llm_serving.network.quantization import unsupported_by_ascend

WINDOW = "attention with a window of 64 tokens"
LAYER_NORMS = "layer norms"
CHOICE = "experts chosen by a rule other than their softmax scores"
LATENT = "projections with one weight per head"
REFUSED = {
    "BaichuanForCausalLM": {"attention with ALiBi slopes"},
    "Cohere2ForCausalLM": {LAYER_NORMS},
    "CohereForCausalLM": {LAYER_NORMS},
    "DeepseekV2ForCausalLM": {LATENT},
    "DeepseekV3ForCausalLM": {LATENT},
    "Ernie4_5_MoeForCausalLM": {CHOICE},
    "Exaone4ForCausalLM": {WINDOW},
    "GPTNeoXForCausalLM": {LAYER_NORMS},
    "Gemma2ForCausalLM": {WINDOW},
    "Gemma3ForCausalLM": {WINDOW},
    "Glm4MoeForCausalLM": {CHOICE},
    "GptOssForCausalLM": {"attention with sinks"},
    "Lfm2ForCausalLM": {"causal convolutions"},
    "Lfm2MoeForCausalLM": {"causal convolutions"},
    "MiniMaxM2ForCausalLM": {CHOICE},
    "MistralForCausalLM": {WINDOW},
    "MixtralForCausalLM": {WINDOW},
    "Olmo3ForCausalLM": {WINDOW},
    "Phi3ForCausalLM": {WINDOW},
    "Qwen2ForCausalLM": {WINDOW},
    "StableLmForCausalLM": {LAYER_NORMS},
    "Starcoder2ForCausalLM": {LAYER_NORMS},
}
"""Architecture -> what the refused ones of its models need. Other models of some of them are served."""


@pytest.fixture(scope="module")
def lacks(tmp_path_factory):
    """Architecture -> for each small model of it what Ascend lacks, or None."""
    found = {}
    for name in models.names():
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(models.model(name).config))
        spec = ModelSpec.from_folder(folder)
        lack = unsupported_by_ascend(spec.network, spec.max_position_embeddings)
        found.setdefault(spec.architecture, set()).add(lack)
    return found


def test_refused_models_lack_the_listed_operations(lacks):
    assert {name: lacks[name] - {None} for name in REFUSED} == REFUSED


def test_started_families_are_supported(tmp_path):
    for name in (*FAMILIES, *MORE_FAMILIES):
        (tmp_path / "config.json").write_text(json.dumps(family_config(name)))
        spec = ModelSpec.from_folder(tmp_path)
        assert unsupported_by_ascend(spec.network, spec.max_position_embeddings) is None, name
        assert not any(width % 32 for width in spec.head_dims), name


def test_every_supported_architecture_is_started(lacks):
    started = {architecture_of(family_config(name), name) for name in (*FAMILIES, *MORE_FAMILIES)}
    assert {name for name, found in lacks.items() if None in found} <= started
