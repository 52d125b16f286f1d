"""Arguments of MindFormers' configuration classes, computed without MindFormers."""

import math

import pytest
from families import models
from llm_serving.models.mindformers_arguments import config_arguments
from llm_serving.models.spec import ModelSpec


def arguments(name, *left_out, **changes):
    config = {key: value for key, value in models.model(name).config.items() if key not in left_out}
    return config_arguments(ModelSpec.from_hugging_face(config | changes), "bfloat16", 256)


def test_number_of_experts_is_passed_under_either_key_of_the_folder():
    expected = arguments("qwen3-moe")
    assert expected["num_experts"] == 8
    assert arguments("qwen3-moe", "num_experts", num_local_experts=8) == expected
    assert arguments("glm4-moe")["n_routed_experts"] == 8


def test_number_that_is_written_as_text_is_passed_as_a_number():
    assert arguments("glm4-moe", routed_scaling_factor="1.5") == arguments("glm4-moe")


def test_groups_of_experts_are_passed_if_a_token_uses_only_some():
    limited = arguments("deepseek-v3-wide")
    assert (limited["n_group"], limited["topk_group"], limited["moe_router_fusion"]) == (4, 2, True)
    free = arguments("deepseek-v3-wide", n_group=1, topk_group=1)
    assert (free["n_group"], free["topk_group"], free["moe_router_fusion"]) == (None, None, False)
    groups = arguments("glm4-moe-groups", num_experts_per_tok=4)
    assert (groups["n_group"], groups["topk_group"], groups["moe_router_fusion"]) == (4, 2, False)
    assert "n_group" not in arguments("qwen3-moe")


def test_scale_of_latent_attention_is_that_of_the_model():
    for changes in ({}, {"rope_scaling": None}):
        given = arguments("deepseek-v3-wide", **changes)
        spec = ModelSpec.from_hugging_face(models.model("deepseek-v3-wide").config | changes)
        (scale,) = {each.attributes["scale"] for each in spec.network.operations if each.kind == "attention"}
        factor = 0.1 * given["mscale"] * math.log(given["rotary_scaling_factor"]) + 1
        assert factor**2 / math.sqrt(16 + 64) == pytest.approx(scale, rel=1e-12)
        assert (given["kv_lora_rank"], given["q_lora_rank"], given["qk_rope_head_dim"]) == (512, 40, 64)
    assert arguments("deepseek-v3-wide", q_lora_rank=None)["q_lora_rank"] is None
