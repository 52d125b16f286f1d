"""What configurations of Llama 4, Gemma 3n, Gemma 4 and Phi-3.5-MoE are refused for, and forms that mean the same."""

import math
import time

import pytest
from families import models
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec


def spec_of(name, **changes):
    config = {key: value for key, value in (models.model(name).config | changes).items() if value is not ...}
    return ModelSpec.from_hugging_face(config)


def test_heads_of_full_layers_may_be_given_for_each_layer():
    heads = {"head_dim": 28, "num_key_value_heads": 1}
    changes = {"global_head_dim": ..., "num_global_key_value_heads": ..., "per_layer_config": {"1": heads, "3": heads}}
    assert spec_of("gemma4-moe", **changes).caches == spec_of("gemma4-moe").caches


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama4",
            {"layer_types": ["sliding_attention"] * 4},
            "`layer_types` must be a list of 4 values, each full_attention",
        ),
        (
            "llama4",
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4},
            "`attention_chunk_size` must",
        ),
        ("llama4", {"num_experts_per_tok": 9}, "`num_experts_per_tok` must be at most the number of experts"),
        (
            "gemma4",
            {"num_kv_shared_layers": 3},
            "`num_kv_shared_layers` must be so small that a layer with full_attention has its own",
        ),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 32}}}, "`per_layer_config` must give the same head_dim"),
        ("gemma4", {"per_layer_config": []}, "`per_layer_config` must give the same head_dim"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "is an encoder"),
        ("gemma4", {"vocab_size_per_layer_input": 100}, "`vocab_size_per_layer_input` must be at least `vocab_size`"),
        (
            "gemma3n",
            {"activation_sparsity_pattern": [0.5]},
            "`activation_sparsity_pattern` must be a list of 5 numbers",
        ),
        ("gemma3n", {"altup_active_idx": 3}, "`altup_active_idx` must be less than `altup_num_inputs`"),
        ("gemma3n", {"intermediate_size": [96]}, "`intermediate_size` must be an integer or a list of 5"),
        ("phimoe", {"num_experts_per_tok": 1}, "`num_experts_per_tok` must be 2"),
        ("minicpm3", {"attention_bias": True}, "`attention_bias` must be false"),
        ("nemotron3", {"hybrid_override_pattern": "MMMMMM"}, "the model must have at least one layer with attention"),
        (
            "granite-hybrid",
            {"time_step_limit": [10**400, 10**401]},
            "`time_step_limit` must be two ascending numbers >= 0",
        ),
        (
            "nemotron3",
            {"hybrid_override_pattern": "MEXEM-"},
            "`hybrid_override_pattern` must be 6 characters, each M, *, - or E",
        ),
    ],
)
def test_unsupported_values_are_refused_by_key(name, changes, message):
    with pytest.raises(ModelError) as error:
        spec_of(name, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize("key", ["short_mscale", "type"])
def test_other_factors_of_a_longrope_with_experts_are_refused(key):
    scaling = models.model("phimoe").config["rope_scaling"] | {key: "linear" if key == "type" else 1.3, "factor": 2.0}
    with pytest.raises(ModelError, match=f"`{key}` must"):
        spec_of("phimoe", rope_scaling=scaling)


def test_an_upper_limit_of_the_time_step_beyond_every_float_is_no_limit():
    operations = spec_of("granite-hybrid", time_step_limit=[0, 10**400]).network.operations
    assert {each.attributes["high"] for each in operations if each.kind == "ssm"} == {math.inf}


def test_an_unknown_architecture_with_a_long_name_is_refused_at_once():
    start = time.process_time()
    with pytest.raises(ModelError, match="is not supported"):
        spec_of("llama4", architectures=["ForA" * 100_000 + "!"])
    assert time.process_time() - start < 5
