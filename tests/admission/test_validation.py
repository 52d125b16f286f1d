"""Request validation: every rule, with the text that a client reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from llm_serving.admission.validation import (
    check_beam_search,
    check_priority,
    check_request,
    end_token_ids,
    stop_token_ids,
)
from llm_serving.config.sections.model import ModelConfig
from llm_serving.core.request_class import MAX_PRIORITY
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.kvcache import BlockManager

VOCAB_SIZE = 50
END_IDS = frozenset({2})
LIMITS = ModelConfig(max_generate_length=40, seq_length=(8, 20))


def check(num_prompt=4, *, num_blocks=16, prompt=None, **sampling):
    """16 blocks of 4 slots hold more than the longest request."""
    prompt = [1] * num_prompt if prompt is None else prompt
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    check_request(prompt, params, VOCAB_SIZE, LIMITS, BlockManager(num_blocks, 4), END_IDS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_prompt": 1, "max_tokens": 39},
        {"num_prompt": 20, "max_tokens": 20},
        {"num_prompt": 20, "max_tokens": 20, "num_blocks": 10},
        {"prompt": [0, VOCAB_SIZE - 1]},
        {"stop_token_ids": (0, VOCAB_SIZE - 1)},
        {"logit_bias": ((VOCAB_SIZE - 1, 1.0),)},
        {"stop_token_ids": range(VOCAB_SIZE)},
        {"allowed_token_ids": (2, 3), "bad_words": ((3, 2),), "min_tokens": 1},
        {"stop_token_ids": [each for each in range(VOCAB_SIZE) if each != 2], "ignore_eos": True, "min_tokens": 1},
    ],
)
def test_validation_accepts_requests_at_the_limits(fields):
    check(**fields)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"num_prompt": 0}, RequestError, "`prompt` must hold at least one token. Given: 0"),
        ({"num_prompt": 21}, ContextLengthError, "`prompt` must be at most 20 tokens long. Given: 21"),
        (
            {"num_prompt": 20, "max_tokens": 21},
            ContextLengthError,
            "`max_tokens` with the prompt of 20 tokens must be at most 40 tokens. Given: 21",
        ),
        (
            {"num_prompt": 20, "max_tokens": 17, "num_blocks": 9},
            ContextLengthError,
            "`max_tokens` with the prompt of 20 tokens must fit the cache of 36 tokens. Given: 17",
        ),
        ({"prompt": [1, 50]}, RequestError, "`prompt` must hold token ids from 0 to 49. Given: 50"),
        ({"prompt": [-1]}, RequestError, "`prompt` must hold token ids from 0 to 49. Given: -1"),
        ({"stop_token_ids": (50,)}, RequestError, "`stop_token_ids` must hold token ids from 0 to 49. Given: 50"),
        ({"logit_bias": ((50, 1.0),)}, RequestError, "`logit_bias` must hold token ids from 0 to 49. Given: 50"),
        ({"allowed_token_ids": (50,)}, RequestError, "`allowed_token_ids` must hold token ids from 0 to 49. Given: 50"),
        ({"bad_words": ((1, 50),)}, RequestError, "`bad_words` must hold token ids from 0 to 49. Given: 50"),
        (
            {"allowed_token_ids": (3, 4), "bad_words": ((3,), (3, 4))},
            RequestError,
            "`allowed_token_ids` must leave a token to sample; "
            "allowed_token_ids, bad_words and min_tokens exclude all tokens",
        ),
        (
            {"allowed_token_ids": (2,), "min_tokens": 1},
            RequestError,
            "`allowed_token_ids` must leave a token to sample; "
            "allowed_token_ids, bad_words and min_tokens exclude all tokens",
        ),
        (
            {"stop_token_ids": [each for each in range(VOCAB_SIZE) if each != 2], "min_tokens": 1},
            RequestError,
            "`min_tokens` must leave a token to sample; allowed_token_ids, bad_words and min_tokens exclude all tokens",
        ),
    ],
)
def test_validation_refuses_what_can_never_be_served(fields, kind, text):
    with pytest.raises(RequestError) as caught:
        check(**fields)
    assert type(caught.value) is kind
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "end"}, "`stop` must be a list of strings. Given: 'end'"),
        ({"stop": None}, "`stop` must be a list of strings. Given: None"),
        ({"stop": [5]}, "`stop` must hold strings of 1 to 256 characters. Given: 5"),
        ({"stop_token_ids": 5}, "`stop_token_ids` must be a list of token ids. Given: 5"),
        ({"allowed_token_ids": 5}, "`allowed_token_ids` must be a list of token ids. Given: 5"),
        ({"bad_words": [5]}, "`bad_words` must hold words, each a list of token ids. Given: 5"),
        ({"logit_bias": {1: 2.0}}, "`logit_bias` must be a list of pairs of a token id and a bias. Given: {1: 2.0}"),
        ({"logit_bias": [(1, 2.0, 3)]}, "`logit_bias` must hold pairs of a token id and a bias. Given: (1, 2.0, 3)"),
    ],
)
def test_parameters_of_a_wrong_type_are_refused_with_field_rule_and_value(fields, text):
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    assert str(error.value) == text


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ("end",)},
        {"logit_bias": ((1, 5.0),)},
        {"bad_words": ((1,),)},
        {"allowed_token_ids": (1,)},
        {"min_tokens": 2},
    ],
)
def test_beam_search_refuses_parameters_that_it_would_ignore(fields):
    check_beam_search(LIMITS, SamplingParams())
    with pytest.raises(RequestError, match=f"`{next(iter(fields))}` is not supported with use_beam_search"):
        check_beam_search(LIMITS, SamplingParams(**fields))


@pytest.mark.parametrize("sign", [1, -1])
def test_priority_beyond_its_limit_is_refused(sign):
    check_priority(sign * MAX_PRIORITY)
    with pytest.raises(RequestError) as caught:
        check_priority(sign * (MAX_PRIORITY + 1))
    assert str(caught.value) == f"`priority` must be an integer from -1000000 to 1000000. Given: {sign * 1000001}"


def test_end_token_ids_come_from_yaml_model_and_tokenizer():
    spec = SimpleNamespace(eos_token_ids=(2, 3), vocab_size=VOCAB_SIZE)
    tokenizer = SimpleNamespace(eos_token_ids=(3, 4, VOCAB_SIZE))  # the last one is beyond the vocabulary
    assert end_token_ids(ModelConfig(), spec, tokenizer) == {2, 3, 4}
    assert end_token_ids(ModelConfig(end_token=0), spec, tokenizer) == {0, 2, 3, 4}


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, {2, 3, 7}), (True, {7})])
def test_ignore_eos_keeps_the_stop_tokens_of_the_request(ignore_eos, expected):
    sampling = SamplingParams(stop_token_ids=(7,), ignore_eos=ignore_eos)
    assert stop_token_ids(sampling, frozenset({2, 3})) == expected
