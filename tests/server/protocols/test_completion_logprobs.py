"""POST /v1/completions: log-probabilities, echoed prompts, and log-probabilities of the prompt."""

from __future__ import annotations

import pytest
from llm_serving.core.request import FinishReason
from support.fakes import DEMO_TOKENIZER, FakeEngine, Piece, Script
from support.server_client import error_of, events, post

PATH = "/v1/completions"


class TestLogprobs:
    def test_completion_logprobs_describe_each_token(self):
        body = post(FakeEngine(), PATH, {"prompt": "x", "logprobs": 2}).json()
        logprobs = body["choices"][0]["logprobs"]
        tokens = [DEMO_TOKENIZER.token_text(token_id) for token_id in (500, 501, 502)]
        assert logprobs["tokens"] == tokens
        assert logprobs["token_logprobs"] == [-0.5] * 3
        assert logprobs["top_logprobs"][0] == {tokens[0]: -0.5, tokens[1]: -1.5}
        assert logprobs["text_offset"] == [0, len(tokens[0]), len(tokens[0]) + len(tokens[1])]

    def test_completion_logprobs_of_0_have_the_sampled_token_only(self):
        logprobs = post(FakeEngine(), PATH, {"prompt": "x", "logprobs": 0}).json()["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{token: -0.5} for token in logprobs["tokens"]]

    def test_text_offsets_continue_between_chunks(self):
        chunks = events(post(FakeEngine(), PATH, {"prompt": "x", "logprobs": 0, "stream": True}))[:-1]
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        offsets = [offset for part in parts for offset in part["text_offset"]]
        tokens = [token for part in parts for token in part["tokens"]]
        assert offsets == [0, len(tokens[0]), len(tokens[0]) + len(tokens[1])]


class TestEcho:
    def test_echo_returns_the_prompt_text(self):
        assert post(FakeEngine(), PATH, {"prompt": "x:", "echo": True}).json()["choices"][0]["text"] == "x:Hello world"

    def test_echo_decodes_prompt_token_ids(self):
        ids = DEMO_TOKENIZER.encode("one two")
        body = post(FakeEngine(), PATH, {"prompt": [ids], "echo": True}).json()
        assert body["choices"][0]["text"] == "one twoHello world"

    def test_echo_in_a_stream_is_part_of_the_first_piece(self):
        chunks = events(post(FakeEngine(), PATH, {"prompt": "x:", "echo": True, "stream": True}))[:-1]
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["x:Hello", " world", ""]

    def test_echo_with_logprobs_includes_the_prompt(self):
        engine = FakeEngine()
        ids = DEMO_TOKENIZER.encode("one two three")
        body = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
        logprobs = post(engine, PATH, body).json()["choices"][0]["logprobs"]
        assert engine.submitted[0].sampling.prompt_logprobs == 1
        named = [f"token_id:{token_id}" for token_id in (*ids, 500, 501, 502)]
        expected = [*(-index for index in range(1, len(ids))), -0.5, -0.5, -0.5]
        assert logprobs["tokens"] == named
        assert logprobs["token_logprobs"] == [None, *expected]
        tops = [{"token_id:0": -0.25}] * (len(ids) - 1) + [{each: -0.5} for each in named[-3:]]
        assert logprobs["top_logprobs"] == [
            None, *(top | {name: value} for top, name, value in zip(tops, named[1:], expected, strict=True))
        ]  # fmt: skip
        generated = [DEMO_TOKENIZER.token_text(token_id) for token_id in (500, 501)]
        prompt = [0, 0, len("one"), len("one two")]
        assert DEMO_TOKENIZER.decode(ids[:1]) == "", "it begins with a special token"
        assert logprobs["text_offset"][: len(ids)] == prompt
        begin = len("one two three")
        assert logprobs["text_offset"][len(ids) :] == [
            begin,
            begin + len(generated[0]),
            begin + len("".join(generated)),
        ]

    def test_text_offsets_are_character_positions(self):
        text = "Zürich 東京 \U0001f600 x"
        body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 1}
        choice = post(FakeEngine(), PATH, body).json()["choices"][0]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        num_prompt = len(DEMO_TOKENIZER.encode(text))
        assert choice["text"].startswith(text)
        assert offsets[num_prompt] == len(text)
        assert any(token.startswith("bytes:") for token in tokens)
        for token, start, end in zip(tokens[1:num_prompt], offsets[1:], offsets[2:], strict=False):
            part = text[start:end]
            assert part == token.removeprefix(" ") if start == 0 else part == token or token.startswith("bytes:")

    def test_echo_with_logprobs_may_generate_no_tokens(self):
        engine = FakeEngine(Script([Piece("", 0)], finish_reason=FinishReason.LENGTH))
        body = {"prompt": "one two", "echo": True, "logprobs": 0, "max_tokens": 0}
        choice = post(engine, PATH, body).json()["choices"][0]
        assert engine.submitted[0].sampling.max_tokens == 0
        assert (choice["text"], choice["finish_reason"]) == ("one two", "length")
        num_prompt = len(DEMO_TOKENIZER.encode("one two"))
        assert choice["logprobs"]["token_logprobs"] == [None, *(-float(i) for i in range(1, num_prompt))]
        assert [len(each or ()) for each in choice["logprobs"]["top_logprobs"]] == [0] + [1] * (num_prompt - 1)

    def test_echo_of_one_token_has_no_logprob(self):
        engine = FakeEngine(Script([Piece("", 0)]))
        body = {"prompt": [7], "echo": True, "logprobs": 2, "max_tokens": 0}
        logprobs = post(engine, PATH, body).json()["choices"][0]["logprobs"]
        assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([None], [None])

    def test_echo_with_logprobs_supports_several_prompts_and_choices(self):
        body = {"prompt": [[5, 6], [7, 8, 9]], "n": 2, "echo": True, "logprobs": 0, "max_tokens": 1}
        engine = FakeEngine()
        choices = post(engine, PATH, body).json()["choices"]
        assert [submitted.sampling.prompt_logprobs for submitted in engine.submitted] == [0, None, 0, None]
        generated = [-0.5] * 3
        expected = [[None, -1.0, *generated], [None, -1.0, -2.0, *generated]]
        assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [
            expected[0], expected[0], expected[1], expected[1]
        ]  # fmt: skip


class TestPromptLogprobs:
    def test_prompt_logprobs_have_the_format_of_vllm(self):
        engine = FakeEngine()
        body = {"prompt": [5, 1, 0], "max_tokens": 3, "prompt_logprobs": 2}
        choice = post(engine, PATH, body).json()["choices"][0]
        text = DEMO_TOKENIZER.token_text
        assert engine.submitted[0].sampling.prompt_logprobs == 2
        assert choice["logprobs"] is None
        assert choice["prompt_logprobs"] == [
            None,
            {
                "1": {"logprob": -1.0, "rank": 1, "decoded_token": text(1)},
                "0": {"logprob": -0.25, "rank": 1, "decoded_token": text(0)},
            },
            {
                "0": {"logprob": -2.0, "rank": 2, "decoded_token": text(0)},
                "1": {"logprob": -1.25, "rank": 2, "decoded_token": text(1)},
            },
        ]

    def test_prompt_logprobs_of_0_have_the_prompt_tokens_only(self):
        body = {"prompt": [5, 6], "prompt_logprobs": 0}
        choice = post(FakeEngine(), PATH, body).json()["choices"][0]
        assert [list(each or ()) for each in choice["prompt_logprobs"]] == [[], ["6"]]

    def test_prompt_logprobs_may_exceed_the_logprobs_of_an_echo(self):
        body = {"prompt": [5, 6], "prompt_logprobs": 3, "echo": True, "logprobs": 1, "max_tokens": 1}
        choice = post(FakeEngine(), PATH, body).json()["choices"][0]
        assert len(choice["prompt_logprobs"][1]) == 4
        assert len(choice["logprobs"]["top_logprobs"][1]) == 2

    def test_prompt_logprobs_are_returned_with_best_of(self):
        body = {"prompt": [5, 6], "prompt_logprobs": 0, "best_of": 3, "n": 2}
        choices = post(FakeEngine(), PATH, body).json()["choices"]
        assert [list(choice["prompt_logprobs"][1]) for choice in choices] == [["6"], ["6"]]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompt_logprobs": 21}, "`prompt_logprobs` must be an integer from 0 to 20. Given: 21"),
            ({"prompt_logprobs": -1}, "`prompt_logprobs` must be an integer from 0 to 20. Given: -1"),
            ({"prompt_logprobs": 1, "stream": True}, "`stream` must be false with prompt_logprobs. Given: True"),
            (
                {"prompt_logprobs": 1, "use_beam_search": True, "temperature": 0},
                "`prompt_logprobs` is not supported with use_beam_search",
            ),
            (
                {"echo": True, "logprobs": 1, "stream": True},
                "`stream` must be false with echo and logprobs. Given: True",
            ),
            ({"echo": True, "logprobs": 21}, "`logprobs` must be an integer from 0 to 20. Given: 21"),
            ({"max_tokens": -1}, "`max_tokens` must be an integer from 0 to 2147483647. Given: -1"),
            (
                {"max_tokens": 0, "use_beam_search": True, "temperature": 0},
                "`max_tokens` must be an integer from 1 to 2147483647. Given: 0",
            ),
        ],
    )
    def test_prompt_logprobs_refuse_incompatible_parameters(self, changes, message):
        engine = FakeEngine()
        assert error_of(post(engine, PATH, {"prompt": "x", **changes}))["message"] == message
        assert engine.submitted == []

    def test_prompt_logprobs_above_the_response_limit_are_refused(self):
        body = {"prompt": ["a " * 100] * 4, "prompt_logprobs": 20, "n": 128}
        error = error_of(post(FakeEngine(), PATH, body))
        rule = "plus one, times the number of prompt tokens of all choices, must be at most 524288. Given: 1096704"
        assert error["message"] == f"`prompt_logprobs` {rule}"
