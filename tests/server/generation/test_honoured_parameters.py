"""Fields of the OpenAI and TGI routes that shape the prompt or the form of the answer."""

from __future__ import annotations

import pytest
from llm_serving.server.parsing.body import IGNORED_HEADER
from llm_serving.text.tokenizer.sentencepiece import SentencePieceVocabulary
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from support.fakes import DEMO_FOLDER, DEMO_TOKENIZER, MAX_MODEL_LEN, FakeEngine
from support.server_client import error_of, events, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello there"}]
OPEN = [*USER, {"role": "assistant", "content": "General Ken "}]


def engine_with(template):
    engine = FakeEngine()
    vocabulary = SentencePieceVocabulary(DEMO_FOLDER / "tokenizer.model", {})
    engine.tokenizer = Tokenizer(vocabulary, {}, (), {"default": template})
    return engine


def prompt_of(path, body, template=None):
    engine = FakeEngine() if template is None else engine_with(template)
    response = post(engine, path, body)
    assert response.status_code == 200, response.text
    return engine.submitted[0].prompt_token_ids


class TestSpecialTokens:
    @pytest.mark.parametrize(("sent", "added"), [(None, True), (True, True), (False, False)])
    def test_completion_adds_special_tokens_unless_disabled(self, sent, added):
        prompt = prompt_of(COMPLETIONS, {"prompt": "hello", "add_special_tokens": sent})
        assert prompt == DEMO_TOKENIZER.encode("hello", add_special_tokens=added)

    @pytest.mark.parametrize(("sent", "added"), [(None, False), (True, True), (False, False)])
    def test_chat_adds_special_tokens_on_request_only(self, sent, added):
        prompt = prompt_of(CHAT, {"messages": USER, "add_special_tokens": sent}, "{{ messages[0].content }}")
        assert prompt == DEMO_TOKENIZER.encode("hello there", add_special_tokens=added)


class TestTruncation:
    @pytest.mark.parametrize(
        ("count", "kept"), [(2, [8, 9]), (4, [6, 7, 8, 9]), (500, [6, 7, 8, 9]), (None, [6, 7, 8, 9])]
    )
    def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(self, count, kept):
        assert prompt_of(COMPLETIONS, {"prompt": [6, 7, 8, 9], "truncate_prompt_tokens": count}) == kept

    def test_truncate_prompt_tokens_applies_to_chat(self):
        whole = prompt_of(CHAT, {"messages": USER})
        assert prompt_of(CHAT, {"messages": USER, "truncate_prompt_tokens": 3}) == whole[-3:]

    def test_truncate_prompt_tokens_of_minus_one_leaves_room_for_the_answer(self):
        body = {"prompt": [5] * 500, "truncate_prompt_tokens": -1, "max_tokens": 28}
        assert len(prompt_of(COMPLETIONS, body)) == MAX_MODEL_LEN - 28

    @pytest.mark.parametrize("count", [0, -2])
    def test_truncate_prompt_tokens_below_one_is_refused(self, count):
        response = post(FakeEngine(), COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": count})
        assert error_of(response)["message"] == (
            f"`truncate_prompt_tokens` must be -1 or an integer of at least 1. Given: {count}"
        )

    def test_echo_returns_the_truncated_prompt(self):
        body = {"prompt": "one two three", "truncate_prompt_tokens": 1, "echo": True}
        kept = DEMO_TOKENIZER.decode(DEMO_TOKENIZER.encode("one two three")[-1:])
        assert post(FakeEngine(), COMPLETIONS, body).json()["choices"][0]["text"] == kept + "Hello world"


class TestContinueFinalMessage:
    def test_continue_final_message_ends_the_prompt_with_the_message(self):
        template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        prompt = prompt_of(CHAT, {"messages": OPEN, "continue_final_message": True}, template)
        text = "<user>hello there</><assistant>General Ken "
        assert prompt == DEMO_TOKENIZER.encode(text, add_special_tokens=False)

    def test_continue_final_message_adds_no_generation_prompt(self):
        template = "{{ messages[1].content }}|{% if add_generation_prompt %}again{% endif %}"
        body = {"messages": OPEN, "continue_final_message": True}
        assert prompt_of(CHAT, body, template) == DEMO_TOKENIZER.encode("General Ken ", add_special_tokens=False)
        response = post(FakeEngine(), CHAT, {**body, "add_generation_prompt": True})
        assert error_of(response)["param"] == "continue_final_message"

    def test_continue_final_message_is_refused_if_the_template_drops_the_message(self):
        response = post(
            engine_with("{{ messages[0].content }}"), CHAT, {"messages": OPEN, "continue_final_message": True}
        )
        assert "because the chat template drops the last message" in error_of(response)["message"]

    def test_echo_of_a_continued_message_begins_the_answer(self):
        body = {"messages": OPEN, "continue_final_message": True, "echo": True}
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        answer = post(engine_with(template), CHAT, body).json()["choices"][0]["message"]["content"]
        assert answer == "General Ken Hello world"
        chunks = events(post(engine_with(template), CHAT, {**body, "stream": True}))[:-1]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == answer
        response = post(engine_with(template), CHAT, {"messages": USER, "echo": True})
        assert response.json()["choices"][0]["message"]["content"] == "Hello world"
        assert response.headers[IGNORED_HEADER] == "echo", "which has no effect on what the user has said"


class TestTokensAsIds:
    def test_completion_logprobs_name_tokens_by_id(self):
        body = {"prompt": "x", "logprobs": 2, "return_tokens_as_token_ids": True}
        logprobs = post(FakeEngine(), COMPLETIONS, body).json()["choices"][0]["logprobs"]
        plain = post(FakeEngine(), COMPLETIONS, {**body, "return_tokens_as_token_ids": False}).json()["choices"][0]
        assert logprobs["tokens"] == ["token_id:500", "token_id:501", "token_id:502"]
        assert "token_id:501" in logprobs["top_logprobs"][0]
        assert logprobs["text_offset"] == plain["logprobs"]["text_offset"]

    def test_chat_logprobs_name_tokens_by_id(self):
        body = {"messages": USER, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
        content = post(FakeEngine(), CHAT, body).json()["choices"][0]["logprobs"]["content"]
        assert content[0]["token"] == content[0]["top_logprobs"][0]["token"] == "token_id:500"
        assert content[0]["bytes"] == list(DEMO_TOKENIZER.token_bytes(500))


def test_detokenize_false_reaches_the_engine_and_refuses_stop_strings():
    engine = FakeEngine()
    assert post(engine, COMPLETIONS, {"prompt": "x", "detokenize": False}).status_code == 200
    assert engine.submitted[0].sampling.detokenize is False
    response = post(engine, COMPLETIONS, {"prompt": "x", "detokenize": False, "stop": "a"})
    assert error_of(response)["param"] == "stop"


class TestTgi:
    def sampling(self, **parameters):
        engine = FakeEngine()
        assert post(engine, "/generate", {"inputs": "x", "parameters": parameters}).status_code == 200
        return engine.submitted[0].sampling

    def test_tgi_min_new_tokens_is_min_tokens(self):
        assert self.sampling(min_new_tokens=3).min_tokens == 3
        response = post(FakeEngine(), "/generate", {"inputs": "x", "parameters": {"min_new_tokens": -1}})
        assert response.json()["error"].startswith("`min_new_tokens` must be an integer from 0")

    def test_tgi_stop_sequences_are_stop_strings(self):
        assert self.sampling(stop_sequences=["a"]).stop == ("a",)
        assert self.sampling(stop=["b"], stop_sequences=[]).stop == ("b",)
        parameters = {"stop": ["a"], "stop_sequences": ["b"]}
        assert post(FakeEngine(), "/generate", {"inputs": "x", "parameters": parameters}).status_code == 422


class TestConstraints:
    @pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})])
    def test_bad_words_and_allowed_token_ids_reach_the_engine(self, path, body):
        engine = FakeEngine()
        response = post(engine, path, {**body, "bad_words": ["Paris", " sail rocket"], "allowed_token_ids": [7, 9]})
        assert response.status_code == 200, response.text
        sampling = engine.submitted[0].sampling
        assert sampling.allowed_token_ids == (7, 9)
        for text in ("Paris", " Paris", "sail rocket", " sail rocket"):
            assert tuple(DEMO_TOKENIZER.encode(text, add_special_tokens=False)) in sampling.bad_words

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("bad_words", [""]), ("bad_words", ["x"] * 129), ("bad_words", ["x" * 257]), ("bad_words", "x"),
            ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", [2**31]),
        ],
    )  # fmt: skip
    def test_bad_words_and_allowed_token_ids_out_of_range_are_refused(self, field, value):
        response = post(FakeEngine(), COMPLETIONS, {"prompt": "x", field: value})
        assert response.status_code == 400
        assert error_of(response)["param"].startswith(field)


class TestDefaultsOfTheModel:
    def sampling(self, path, body, **defaults):
        engine = FakeEngine()
        engine.sampling_defaults = defaults
        assert post(engine, path, body).status_code == 200
        return engine.submitted[0].sampling

    @pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})])
    def test_model_sampling_defaults_apply_to_missing_fields(self, path, body):
        sampling = self.sampling(path, {**body, "top_p": 1.0}, temperature=0.5, top_p=0.25, top_k=7)
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 1.0, 7)

    def test_model_max_tokens_limits_chat_without_max_tokens(self):
        assert self.sampling(CHAT, {"messages": USER}, max_tokens=9).max_tokens == 9
        assert self.sampling(CHAT, {"messages": USER, "max_tokens": 12}, max_tokens=9).max_tokens == 12
        assert self.sampling(CHAT, {"messages": USER}, max_tokens=10**6).max_tokens < MAX_MODEL_LEN

    @pytest.mark.parametrize("path", ["/generate", "/models/demo"])
    def test_model_sampling_defaults_do_not_apply_to_tgi_and_legacy_routes(self, path):
        body = {"inputs": "x", "parameters": {"max_new_tokens": 5, "do_sample": True}}
        assert self.sampling(path, body, temperature=0.5).temperature == 1.0


def test_chat_min_tokens_needs_no_max_tokens():
    engine = FakeEngine()
    assert post(engine, CHAT, {"messages": USER, "min_tokens": 5}).status_code == 200
    assert engine.submitted[0].sampling.min_tokens == 5
    response = post(engine, CHAT, {"messages": USER, "min_tokens": 5, "max_tokens": 4})
    assert error_of(response)["message"] == "`min_tokens` must be an integer from 0 to 4. Given: 5"
    response = post(engine, CHAT, {"messages": USER, "min_tokens": MAX_MODEL_LEN})
    assert error_of(response)["param"] == "min_tokens"
