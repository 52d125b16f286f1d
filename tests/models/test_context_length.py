from __future__ import annotations

import json

import pytest
from families import models
from llm_serving.errors import ModelError
from llm_serving.models.spec import ContextLengths, ModelSpec, context_lengths
from support.small_model import CONFIG


def positions(folder, scaling, own=32768, tokenizer=None, **config):
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokenizer}))
    config = CONFIG | {"max_position_embeddings": own, "rope_scaling": scaling} | config
    return context_lengths(ModelSpec.from_hugging_face(config), folder)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "default"},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        {
            "type": "longrope",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
        {"type": "linear", "factor": 1.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    ],
)
def test_context_lengths_without_scaling_are_those_of_the_config(tmp_path, scaling):
    assert positions(tmp_path, scaling) == ContextLengths(32768, 32768)


@pytest.mark.parametrize(
    ("scaling", "most", "reason"),
    [
        ({"type": "linear", "factor": 2}, 65536, "32768 x 2 by rope scaling linear"),
        ({"rope_type": "yarn", "factor": 4.0}, 131072, "32768 x 4 by rope scaling yarn"),
        (
            {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
            163840,
            "4096 x 40 by rope scaling yarn",
        ),
        ({"type": "linear", "factor": 1e9}, 2**31 - 1, "32768 x 1e+09 by rope scaling linear"),
    ],
)
def test_context_lengths_include_rope_scaling(tmp_path, scaling, most, reason):
    assert positions(tmp_path, scaling) == ContextLengths(most, most, reason)


def test_context_lengths_of_dynamic_scaling_keep_the_default(tmp_path):
    expected = ContextLengths(32768, 65536, "32768 x 2 by rope scaling dynamic")
    assert positions(tmp_path, {"type": "dynamic", "factor": 2.0}) == expected


def test_context_lengths_are_limited_by_model_max_length(tmp_path):
    linear = {"type": "linear", "factor": 4.0}
    expected = ContextLengths(40000, 40000, "32768 x 4 by rope scaling linear, at most model_max_length")
    assert positions(tmp_path, linear, tokenizer=40000) == expected
    assert positions(tmp_path, linear, tokenizer=2048) == ContextLengths(32768, 32768)
    assert positions(tmp_path, linear, tokenizer=10**30).maximum == 131072


def test_context_lengths_read_rope_parameters(tmp_path):
    parameters = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}
    assert positions(tmp_path, None, rope_parameters=parameters).maximum == 65536


def test_context_lengths_ignore_scaling_of_some_layers(tmp_path):
    config = models.model("gemma3-linear").config
    spec = ModelSpec.from_hugging_face(config)
    assert {each.scaling is None for each in spec.network.rotaries} == {True, False}
    assert context_lengths(spec, tmp_path) == ContextLengths(*[config["max_position_embeddings"]] * 2)


def test_context_lengths_refuse_a_broken_tokenizer_config(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: cannot be read"):
        positions(tmp_path, {"type": "linear", "factor": 2.0})
