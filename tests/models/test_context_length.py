"""The longest context of a model folder."""

from __future__ import annotations

import json

import pytest
from families import models
from llm_serving.errors import ModelError
from llm_serving.models.context_length import Positions, positions_of
from llm_serving.models.spec import ModelSpec
from support.small_model import CONFIG


def positions(folder, scaling, own=32768, tokenizer=None, **config):
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokenizer}))
    config = CONFIG | {"max_position_embeddings": own, "rope_scaling": scaling} | config
    return positions_of(ModelSpec.from_hugging_face(config), folder)


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
def test_others_have_their_own_number(tmp_path, scaling):
    assert positions(tmp_path, scaling) == Positions(32768, 32768)


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
def test_stretched_positions_count(tmp_path, scaling, most, reason):
    assert positions(tmp_path, scaling) == Positions(most, most, reason)


def test_dynamic_scaling_is_for_those_who_ask_for_more(tmp_path):
    expected = Positions(32768, 65536, "32768 x 2 by rope scaling dynamic")
    assert positions(tmp_path, {"type": "dynamic", "factor": 2.0}) == expected


def test_the_tokenizers_config_may_say_where_it_ends(tmp_path):
    linear = {"type": "linear", "factor": 4.0}
    expected = Positions(40000, 40000, "32768 x 4 by rope scaling linear, at most model_max_length")
    assert positions(tmp_path, linear, tokenizer=40000) == expected
    assert positions(tmp_path, linear, tokenizer=2048) == Positions(32768, 32768)
    assert positions(tmp_path, linear, tokenizer=10**30).most == 131072


def test_newer_folders_write_it_elsewhere(tmp_path):
    parameters = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}
    assert positions(tmp_path, None, rope_parameters=parameters).most == 65536


def test_layers_of_which_some_are_not_stretched_keep_the_models_number(tmp_path):
    config = models.model("gemma3-linear").config
    spec = ModelSpec.from_hugging_face(config)
    assert {each.scaling is None for each in spec.network.rotaries} == {True, False}
    assert positions_of(spec, tmp_path) == Positions(*[config["max_position_embeddings"]] * 2)


def test_a_broken_tokenizer_config_is_told(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: cannot be read"):
        positions(tmp_path, {"type": "linear", "factor": 2.0})
