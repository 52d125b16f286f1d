"""Arguments of MindFormers' configuration classes, computed without MindFormers."""

import pytest
from families import models
from llm_serving.lowering.mindformers import _config_arguments
from llm_serving.models.spec import ModelSpec

pytestmark = pytest.mark.mindspore


def arguments(name, *left_out, **changes):
    config = {key: value for key, value in models.model(name).config.items() if key not in left_out}
    return _config_arguments(ModelSpec.from_hugging_face(config | changes), "bfloat16", 256)


def test_number_of_experts_is_passed_under_either_key_of_the_folder():
    expected = arguments("qwen3-moe")
    assert expected["num_experts"] == 8
    assert arguments("qwen3-moe", "num_experts", num_local_experts=8) == expected
    assert arguments("glm4-moe")["n_routed_experts"] == 8


def test_number_that_is_written_as_text_is_passed_as_a_number():
    assert arguments("glm4-moe", routed_scaling_factor="1.5") == arguments("glm4-moe")
