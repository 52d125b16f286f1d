"""The generation config of a model folder."""

from __future__ import annotations

import json

import pytest
from llm_serving.core.sampling_params import as_float32, generation_defaults, generation_end_ids
from llm_serving.errors import ModelError


def read(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return generation_defaults(tmp_path)


def test_folder_without_generation_config_has_no_defaults(tmp_path):
    assert generation_defaults(None) == generation_defaults(tmp_path) == {}
    assert read(tmp_path, {"bos_token_id": 1, "do_sample": False, "temperature": None}) == {}


def test_generation_config_defaults_have_the_names_of_request_parameters(tmp_path):
    content = {"temperature": 0.6, "top_k": -1, "top_p": 0.9, "repetition_penalty": 1, "max_new_tokens": 50, "x": 1}
    assert read(tmp_path, content) == {
        "temperature": as_float32(0.6),
        "top_k": 0,
        "top_p": as_float32(0.9),
        "repetition_penalty": 1.0,
        "max_tokens": 50,
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"top_p": 1e-46}, "`top_p` must be above 0.0 and at most 1.0"),
        (
            {"temperature": "hot"},
            "`temperature` must be a number from 0.0 to 100.0. Given: 'hot'. Correct the file, or",
        ),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be an integer from 1"),
        ([], "must be a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_generation_config_error_names_the_file_of_an_invalid_default(tmp_path, content, text):
    with pytest.raises(ModelError, match=r"generation_config\.json: ") as caught:
        read(tmp_path, content)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("value", "ids"), [(5, (5,)), ([5, 7, 5], (5, 7)), (None, ()), (-1, ()), ([], ()), ([3, -1], (3,))]
)
def test_generation_config_end_ids_may_be_one_or_several(tmp_path, value, ids):
    read(tmp_path, {"eos_token_id": value})
    assert generation_end_ids(tmp_path) == ids


@pytest.mark.parametrize("value", ["</s>", True, [True], [1.5], {}, list(range(257))])
def test_generation_config_with_invalid_end_ids_is_refused(tmp_path, value):
    read(tmp_path, {"eos_token_id": value})
    with pytest.raises(ModelError, match=r"generation_config\.json: `eos_token_id` must be a token id or a list"):
        generation_end_ids(tmp_path)


def test_folder_without_generation_config_has_no_end_ids(tmp_path):
    assert generation_end_ids(tmp_path) == ()
