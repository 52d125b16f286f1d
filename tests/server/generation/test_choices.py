"""`n`, `best_of` and beam search over HTTP."""

from __future__ import annotations

import asyncio

import pytest
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.server.generation.sampling import with_choice_seed
from support.fakes import FakeEngine, Piece, Script, Submitted
from support.gated_server import GatedServer
from support.server_client import error_of, post

PATH = "/v1/completions"


def script(submitted: Submitted) -> Script:
    """Return a script whose second choice is shorter, and whose text shows its seed."""
    return Script(pieces=(Piece(f"seed {submitted.sampling.seed}"), Piece("", 1)))


def test_choices_fork_from_the_first_choice_of_their_prompt():
    engine = FakeEngine()
    post(engine, PATH, {"prompt": ["a", "b"], "n": 3})
    forks = [submitted.fork_of for submitted in engine.submitted]
    assert forks[0] is forks[3] is None
    assert forks[1] is forks[2] is not forks[4] is forks[5]
    assert None not in (forks[1], forks[4])


def test_choices_equal_single_requests_with_the_derived_seeds():
    engine = FakeEngine(script_for=script)
    together = post(engine, PATH, {"prompt": "a", "n": 3, "seed": 5}).json()["choices"]
    seeds = [with_choice_seed(SamplingParams(seed=5), choice).seed for choice in range(3)]
    alone = [post(engine, PATH, {"prompt": "a", "seed": seed}).json()["choices"][0] for seed in seeds]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
    assert len({choice["text"] for choice in together}) == 3


def test_best_of_generates_more_and_hides_its_logprobs():
    engine = FakeEngine(script_for=script)
    answer = post(engine, PATH, {"prompt": ["a", "b"], "n": 2, "best_of": 3, "seed": 5}).json()
    assert len(engine.submitted) == 6
    assert {submitted.sampling.logprobs for submitted in engine.submitted} == {0}
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    seeds = [submitted.sampling.seed for submitted in engine.submitted]
    # All tokens are equally likely in the fake, so the first ones are the best.
    assert [choice["text"] for choice in answer["choices"]] == [f"seed {seeds[i]}" for i in (0, 1, 3, 4)]
    assert all(choice["logprobs"] is None for choice in answer["choices"])


def test_best_of_is_charged_before_submission():
    engine = FakeEngine(num_waiting=15)
    assert post(engine, PATH, {"prompt": "a", "best_of": 6}).status_code == 429
    assert engine.submitted == []


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_beam_search_returns_the_best_answers_first(path):
    engine = FakeEngine()
    body = {"n": 2, "best_of": 4, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
    prompt = {"prompt": "a"} if path == PATH else {"messages": [{"role": "user", "content": "a"}]}
    answer = post(engine, path, body | prompt).json()
    (submitted,) = engine.submitted
    assert submitted.beam_search == BeamSearchParams(width=4, num_returned=2, length_penalty=0.5, early_stopping=True)
    assert submitted.sampling.temperature == 0.0
    texts = [choice["text"] if path == PATH else choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["beam 0", "beam 1"]


def test_failed_beam_search_is_an_error():
    engine = FakeEngine(script=Script(error="lost"))
    assert post(engine, PATH, {"prompt": "a", "use_beam_search": True}).status_code == 500


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"n": 0}, "n", "0"),
        ({"best_of": 129}, "best_of", "129"),
        ({"n": 3, "best_of": 2}, "best_of", "2"),
        ({"best_of": 2, "stream": True}, "best_of", "2"),
        ({"length_penalty": 0.5}, "length_penalty", "0.5"),
        ({"early_stopping": True}, "early_stopping", "True"),
        ({"use_beam_search": True, "best_of": 11}, "best_of", "11"),
        ({"use_beam_search": True, "stream": True}, "stream", "True"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature", "0.7"),
        ({"use_beam_search": True, "frequency_penalty": 1.0}, "frequency_penalty", "1.0"),
        ({"use_beam_search": True, "length_penalty": 11.0}, "length_penalty", "11.0"),
    ],
)
def test_choices_refuse_incompatible_parameters(body, field, value):
    engine = FakeEngine()
    response = post(engine, PATH, {"prompt": "a"} | body)
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert value in error_of(response)["message"]
    assert engine.submitted == []


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_beam_search_refuses_parameters_that_it_would_ignore(path):
    fields = {"stop": "x", "logit_bias": {"7": 1}, "bad_words": ["x"], "allowed_token_ids": [7], "min_tokens": 1}
    prompt = {"prompt": "a"} if path == PATH else {"messages": [{"role": "user", "content": "a"}]}

    async def run():
        server = GatedServer()
        async with server.running() as client:
            for name, value in fields.items():
                body = prompt | {"use_beam_search": True, "temperature": 0, "max_tokens": 2, name: value}
                refused = await client.post(path, json=body)
                assert refused.status_code == 400
                assert error_of(refused)["message"] == f"`{name}` is not supported with use_beam_search"
            assert server.num_computed == 0

    asyncio.run(run())
