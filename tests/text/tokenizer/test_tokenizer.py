"""Reading tokenizer folders, encoding, decoding, chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import llm_serving.demo_model
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.errors import ModelError, RequestError
from llm_serving.text import chat_template
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from sentencepiece import SentencePieceProcessor
from support.tokenizer_files import byte_fallback_folder, byte_level_folder, write_config
from tokenizers import Tokenizer as TokenizersTokenizer

DEMO = Path(llm_serving.demo_model.__file__).parent
READABLE = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=30)

demo = Tokenizer.load(DEMO)
demo_processor = SentencePieceProcessor(model_file=str(DEMO / "tokenizer.model"))


@pytest.fixture(scope="module", params=[byte_level_folder, byte_fallback_folder])
def folder(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("tokenizer"))


def user(text):
    return [{"role": "user", "content": text}]


class TestSentencePiece:
    def test_sentencepiece_bos_token_follows_the_config(self):
        assert demo.encode("hello") == [1, *demo_processor.encode("hello")]
        assert demo.encode("hello", add_special_tokens=False) == demo_processor.encode("hello")

    @given(READABLE)
    def test_sentencepiece_decode_equals_the_library(self, text):
        ids = demo_processor.encode(text)
        assert demo.decode(ids) == demo_processor.decode(ids)

    def test_sentencepiece_recognises_special_tokens_in_a_text(self):
        assert demo.encode("<s>hello</s>", add_special_tokens=False) == [1, *demo_processor.encode("hello"), 2]

    def test_decode_skips_special_tokens_by_default(self):
        ids = demo.encode("hello</s>")
        assert demo.decode(ids) == "hello"
        assert demo.decode(ids, skip_special_tokens=False) == "<s> hello</s>"

    def test_ids_without_text_decode_to_nothing(self):
        assert demo.decode([-1, 10**9]) == ""

    def test_sentencepiece_tokenizer_reports_vocabulary_size_and_special_tokens(self):
        assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_ids) == (2048, 1, (2,))
        assert demo.special_token_ids == {0, 1, 2, 3}

    def test_token_text_of_a_partial_character_shows_its_bytes(self):
        ids = demo_processor.encode("😀")[1:]
        assert [demo.token_bytes(token_id) for token_id in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
        assert demo.token_text(ids[0]) == "bytes:\\xf0"

    def test_sentencepiece_added_tokens_of_the_config_extend_the_vocabulary(self, tmp_path):
        shutil.copy(DEMO / "tokenizer.model", tmp_path)
        added = {"2050": {"content": "<|call|>", "special": True}, "2051": {"content": "é!", "special": False}}
        write_config(tmp_path, added_tokens_decoder=added, add_bos_token=False)
        tokenizer = Tokenizer.load(tmp_path)
        ids = tokenizer.encode("<|call|>é!")
        assert ids == [2050, 2051]
        assert tokenizer.decode(ids) == "é!"
        assert tokenizer.vocab_size == 2052


class TestTokenizersFile:
    @given(text=READABLE)
    def test_tokenizer_json_decode_equals_the_library(self, folder, text):
        library = TokenizersTokenizer.from_file(str(folder / "tokenizer.json"))
        ids = library.encode(text, add_special_tokens=False).ids
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.decode(ids) == library.decode(ids)

    def test_byte_level_special_tokens_follow_the_post_processor(self, tmp_path):
        tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
        assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id
        assert tokenizer.encode("hello", add_special_tokens=False) == tokenizer.encode("hello")[1:]

    def test_config_may_disable_the_bos_token(self, tmp_path):
        tokenizer = Tokenizer.load(byte_fallback_folder(tmp_path, add_bos_token=False))
        assert tokenizer.encode("hello") == tokenizer.encode("hello", add_special_tokens=False)

    def test_added_token_decodes_to_its_text(self, tmp_path):
        tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
        assert tokenizer.decode(tokenizer.encode("a<tool é>b")) == "a<tool é>b"

    def test_end_token_ids_come_from_tokenizer_and_generation_config(self, tmp_path):
        byte_level_folder(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.eos_token_ids[1:] == (5, 6)
        assert tokenizer.decode([tokenizer.eos_token_ids[0]], skip_special_tokens=False) == "<|eot|>"

    def test_tokenizer_json_with_an_unknown_decoder_is_refused(self, tmp_path):
        byte_level_folder(tmp_path)
        path = tmp_path / "tokenizer.json"
        content = json.loads(path.read_text()) | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}
        path.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=r"decoder 'BPEDecoder' is not supported\. Known: ByteLevel, "):
            Tokenizer.load(tmp_path)


class TestLoad:
    def test_tokenizer_load_refuses_a_folder_without_tokenizer(self, tmp_path):
        with pytest.raises(ModelError, match=r"has no tokenizer file: none of tokenizer\.json, tokenizer\.model, "):
            Tokenizer.load(tmp_path)

    def test_tokenizer_load_refuses_a_missing_vocab_file(self, tmp_path):
        with pytest.raises(ModelError, match=r"nowhere\.model does not exist"):
            Tokenizer.load(tmp_path, tmp_path / "nowhere.model")

    def test_tokenizer_load_prefers_the_given_vocab_file(self, tmp_path):
        assert Tokenizer.load(tmp_path, DEMO / "tokenizer.model").encode("hello") == demo.encode("hello")
        assert Tokenizer.load(tmp_path, DEMO).encode("hello") == demo.encode("hello")

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
    def test_tokenizer_load_refuses_a_corrupt_file(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"\x00 not this")
        with pytest.raises(ModelError, match=r"is not a "):
            Tokenizer.load(tmp_path)

    def test_tokenizer_load_refuses_a_special_token_outside_the_vocabulary(self, tmp_path):
        shutil.copy(DEMO / "tokenizer.model", tmp_path)
        write_config(tmp_path, eos_token="<|nowhere|>")
        with pytest.raises(ModelError, match=r"`eos_token` must be in the vocabulary\. Given: '<\|nowhere\|>'"):
            Tokenizer.load(tmp_path)


class TestChatTemplate:
    def load(self, folder, template):
        shutil.copy(DEMO / "tokenizer.model", folder)
        write_config(folder, bos_token="<s>", eos_token="</s>", chat_template=template)
        return Tokenizer.load(folder)

    def test_chat_template_gets_special_tokens_and_generation_prompt(self, tmp_path):
        template = (
            "{{ bos_token }}{% for m in messages %}\n"
            "  {% if m.role == 'user' %}\n[{{ m.content }}]{{ eos_token }}\n  {% endif %}\n{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}"
        )
        tokenizer = self.load(tmp_path, template)
        assert tokenizer.apply_chat_template(user("a\nb")) == "<s>[a\nb]</s>\n>"
        assert tokenizer.apply_chat_template(user("x"), add_generation_prompt=False) == "<s>[x]</s>\n"

    def test_chat_template_named_default_is_used(self, tmp_path):
        templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
        assert self.load(tmp_path, templates).apply_chat_template(user("x")) == "yes"

    def test_chat_template_file_takes_precedence(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
        assert self.load(tmp_path, "config").apply_chat_template(user("x")) == "file x"

    def test_model_without_chat_template_refuses_messages(self, tmp_path):
        with pytest.raises(RequestError, match="the model has no chat template"):
            self.load(tmp_path, None).apply_chat_template(user("x"))

    def test_chat_template_raise_exception_is_a_request_error(self, tmp_path):
        tokenizer = self.load(tmp_path, "{{ raise_exception('roles must alternate') }}")
        with pytest.raises(RequestError, match="`messages` do not fit the model's chat template: roles must alternate"):
            tokenizer.apply_chat_template(user("x"))

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
            "{{ cycler.__init__.__globals__ }}",
            "{% for i in range(10000000) %}{% endfor %}",
            "{{ 1 / 0 }}",
            "{{ messages[0].content + 1 }}",
            "{{ undefined_name.attribute }}",
            "{{ '\\ud800' }}",
        ],
    )
    def test_chat_template_failure_is_a_request_error(self, tmp_path, template):
        tokenizer = self.load(tmp_path, template)
        with pytest.raises(RequestError, match="do not fit the model's chat template"):
            tokenizer.apply_chat_template(user("x"))

    def test_chat_template_with_endless_output_is_refused(self, tmp_path):
        tokenizer = self.load(tmp_path, "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}")
        with pytest.raises(RequestError, match="must render to at most 3145728 characters"):
            tokenizer.apply_chat_template(user("x" * 2**20))

    @pytest.mark.parametrize(
        "template",
        [
            "{{ '%1000000000d' | format(messages | length) }}",
            "{{ 'x' * 10 ** (11 + messages | length) }}",
            "{{ messages | tojson(indent=10**9) }}",
            "{{ 9 ** (10 ** (8 + messages | length)) }}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{{ range(99999) | batch(10**9, 'x') | list }}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        ],
    )
    def test_costly_chat_template_ends_only_its_process(self, tmp_path, template, monkeypatch):
        monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.5)
        tokenizer = self.load(tmp_path, "{% if messages | length == 1 %}" + template + "{% else %}fine{% endif %}")
        with pytest.raises(RequestError, match=r"`messages` (need too much time|do not fit|must render)"):
            tokenizer.apply_chat_template(user("x"))
        assert tokenizer.apply_chat_template(user("x") * 2) == "fine"

    def test_costly_chat_template_compilation_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.5)
        tokenizer = self.load(tmp_path, "{{ '%1000000000d' | format(1) }}")
        for _ in range(2):
            with pytest.raises(RequestError, match=r"`messages` (need too much time|cannot be rendered)"):
                tokenizer.apply_chat_template(user("x"))

    def test_killed_chat_template_process_is_restarted(self, tmp_path):
        tokenizer = self.load(tmp_path, "{{ messages[0].content }}")
        assert tokenizer.apply_chat_template(user("a")) == "a"
        free = tokenizer._conversations._templates["default"]._processes._free
        process = next(each for _ in range(2) if (each := free.get()) or free.put(None))
        process._process.kill()
        process._process.wait()
        free.put(process)
        assert [tokenizer.apply_chat_template(user(text)) for text in "bcd"] == ["b", "c", "d"]

    def test_chat_template_variables_above_the_frame_limit_are_refused(self, tmp_path):
        tokenizer = self.load(tmp_path, "{{ x }}")
        with pytest.raises(RequestError, match="`chat_template_kwargs` must contain only integers of at most 64 bits"):
            tokenizer.apply_chat_template(user("a"), x=2**70)
        assert tokenizer.apply_chat_template(user("a"), x=[1, {"y": None}, 2**63]) == str([1, {"y": None}, 2**63])

    def test_template_code_in_a_message_is_not_evaluated(self, tmp_path):
        tokenizer = self.load(tmp_path, "{{ messages[0].content }}")
        assert tokenizer.apply_chat_template(user("{{ 1 + 1 }}")) == "{{ 1 + 1 }}"

    def test_invalid_chat_template_is_refused_at_start(self, tmp_path):
        with pytest.raises(ModelError, match="chat_template cannot be compiled"):
            self.load(tmp_path, "{% for %}")

    @pytest.mark.parametrize("template", ["{{ x }}\ud800", [{"name": "default", "template": "\udfff"}]])
    def test_chat_template_with_a_lone_surrogate_is_refused_at_start(self, tmp_path, template):
        with pytest.raises(ModelError, match="surrogates not allowed"):
            self.load(tmp_path, template)
        with pytest.raises(ModelError, match="lone surrogate"):
            chat_template.ChatTemplate("\ud800")

    def test_chat_template_error_text_may_contain_any_characters(self, tmp_path):
        tokenizer = self.load(tmp_path, "{{ raise_exception('no \\ud800') }}")
        with pytest.raises(RequestError, match=r"do not fit the model's chat template: no \\ud800"):
            tokenizer.apply_chat_template(user("x"))

    @pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
    def test_chat_template_integer_beyond_64_bits_error_names_the_field(self, tmp_path, field):
        tokenizer = self.load(tmp_path, "{{ messages[0].content }}")
        call = {"function": {"name": "f", "arguments": {"n": 2**64}}}
        messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}] if field == "messages" else user("x")
        given = {"tools": [{"n": 2**64}]} if field == "tools" else {"n": 2**64} if field != "messages" else {}
        with pytest.raises(RequestError, match=f"`{field}` must contain only integers of at most 64 bits"):
            tokenizer.apply_chat_template(messages, **given)


def bare_tokenizer(path, model, **parts):
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model, **parts}
    path.write_text(json.dumps(content))
    return Tokenizer.load(path.parent)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}, {}),
        ({"type": "BPE", "vocab": {"x": 0}, "merges": [], "unk_token": "<unk>"}, {}),
        ({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}, {}),
        (
            {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(x+x+)+y"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
        ),
    ],
    ids=["WordLevel", "BPE", "Unigram", "panic"],
)
def test_text_that_a_tokenizer_cannot_encode_is_a_request_error(tmp_path, model, parts):
    tokenizer = bare_tokenizer(tmp_path / "tokenizer.json", model, **parts)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_pair(text, text)):
        with pytest.raises(RequestError, match="`prompt` cannot be encoded by the model's tokenizer"):
            encode("b" + "x" * 3000)


def test_token_ids_of_a_tokenizer_json_are_limited(tmp_path):
    model = {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}
    with pytest.raises(ModelError, match=r"tokenizer\.json: token ids must be less than 16777216\. Found: 4294967295"):
        bare_tokenizer(tmp_path / "tokenizer.json", model)
