"""Tokenizers of GGUF files give the ids of tokenizer files with the same tokens."""

import itertools
import json

import pytest
from llm_serving.config import load_config
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.errors import ModelError
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from llm_serving_tools.commands.check_config import describe_end_tokens
from sentencepiece import SentencePieceProcessor
from support.gguf_files import gguf_bytes
from support.tokenizer_files import byte_level_folder
from tokenizers import Tokenizer as LibraryTokenizer

TEXTS = [
    "",
    "hello world, hello there",
    "  the quick brown fox\n\njumps over  12345 dogs' ",
    "数える 一二三 naïve café 😀 e\u0301",
    "It's we'll DON'T\tx\r\n y   ",
    " hello",
]


def keys(**facts):
    return {f"tokenizer.ggml.{key}": value for key, value in facts.items()}


def write(path, template=None, **facts):
    more = {} if template is None else {"tokenizer.chat_template": template}
    path.write_bytes(gguf_bytes({**keys(**facts), **more}, {}))
    return path


def sentencepiece_facts():
    """Metadata of the shipped tokenizer.model."""
    model = SentencePieceProcessor(model_file=str(DEMO_FOLDER / "tokenizer.model"))
    kinds = ((model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6))
    ids = range(model.vocab_size())
    return {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": [next((kind for test, kind in kinds if test(i)), 1) for i in ids],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
    }


@pytest.mark.parametrize("text", [*TEXTS, "Add 17 and 25.", "<s>x</s> y"])
def test_gguf_sentencepiece_equals_the_shipped_model(tmp_path, text):
    ours = Tokenizer.load(write(tmp_path / "a.gguf", **sentencepiece_facts()))
    theirs = Tokenizer.load(DEMO_FOLDER)
    for special in (False, True):
        assert ours.encode(text, special) == theirs.encode(text, special)
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (
        theirs.bos_token_id,
        theirs.eos_token_ids,
        theirs.vocab_size,
    )
    assert ours.special_token_ids == theirs.special_token_ids


def test_gguf_sentencepiece_may_omit_prefix_space_and_bos(tmp_path):
    facts = sentencepiece_facts() | {"add_space_prefix": False, "add_bos_token": False}
    ours = Tokenizer.load(write(tmp_path / "a.gguf", **facts))
    with_space = Tokenizer.load(write(tmp_path / "b.gguf", **sentencepiece_facts()))
    assert ours.encode(" Count") == with_space.encode("Count")[1:]
    assert ours.decode(ours.encode("Count to 3.")) == "Count to 3."


def byte_pair_facts(folder, pre="gpt-2"):
    """Metadata of a tokenizer.json, which is written too."""
    content = json.loads((byte_level_folder(folder) / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"] | {each["content"]: each["id"] for each in content["added_tokens"]}
    special = {each["content"]: 3 if each["special"] else 4 for each in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [special.get(each, 1) for each in tokens],
        "merges": merges,
        "bos_token_id": vocab["<|begin|>"],
        "eos_token_id": vocab["<|eot|>"],
    }


@pytest.mark.parametrize("text", [*TEXTS, "<|begin|>x<|eot|> <tool é>"])
def test_gguf_byte_pairs_equal_the_tokenizer_json(tmp_path, text):
    facts = byte_pair_facts(tmp_path)
    ours = Tokenizer.load(write(tmp_path / "a.gguf", **facts))
    library = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special_tokens=False) == expected
    assert ours.encode(text) == expected  # the file does not say that a text begins with a token
    assert ours.decode(expected, skip_special_tokens=False) == text
    assert ours.eos_token_ids == (facts["eos_token_id"],)
    begins = Tokenizer.load(write(tmp_path / "b.gguf", **facts, add_bos_token=True))
    assert begins.encode(text) == [facts["bos_token_id"], *expected]


TEXT = "It's 12345!"
GPT_2, DIGITS = ["It", "'s", " 12345", "!"], ["It", "'s", " ", "1", "2", "3", "4", "5", "!"]
THREES = ["It", "'s", " ", "123", "45", "!"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        *((pre, TEXT, THREES) for pre in ("llama-bpe", "smaug-bpe", "dbrx", "chatglm-bpe", "glm4")),
        *((pre, TEXT, DIGITS) for pre in ("qwen2", "qwen35", "hunyuan", "stablelm2", "seed-coder")),
        *((pre, TEXT, DIGITS) for pre in ("deepseek-r1-qwen", "smollm", "refact", "command-r")),
        *((pre, TEXT, GPT_2) for pre in ("gpt-2", "granite-docling", "olmo", "exaone4")),
        *((pre, TEXT, ["It's", " ", "123", "45", "!"]) for pre in ("gpt-4o", "minimax-m2", "kimi-k2")),
        ("kimi-k2", "camelCaseABCd", ["camel", "Case", "ABCd"]),
        ("gpt-4o", "camelCaseABCd", ["camel", "Case", "ABCd"]),
        ("tekken", TEXT, ["It", "'s", " ", "1", "2", "3", "4", "5", "!"]),
        ("tekken", "camelCase.//x", ["camel", "Case", ".//", "x"]),
        ("deepseek-llm", TEXT, ["It", "'", "s", " ", "1", "2", "3", "4", "5", "!"]),
        ("deepseek-llm", "if (a) --b;", ["if", " (", "a", ")", " --", "b", ";"]),
        ("deepseek-coder", "if (a) --b;", ["if", " (", "a", ")", " --", "b", ";"]),
        ("deepseek-coder", "a12", ["a", "1", "2"]),
        ("deepseek-v3", TEXT, ["It", "'s", " ", "123", "45", "!"]),
        ("deepseek-v3", "a.b(cd) x", ["a", ".b", "(cd", ")", " x"]),
    ],
)
def test_gguf_pre_tokenizer_name_selects_the_word_rule(tmp_path, pre, text, words):
    """Every expected word is a token of the vocabulary, whatever the merges; so is every pair of neighbours."""
    letters = [chr(code) for code in (*range(0x21, 0x7F), 0x120)]
    facts = {"model": "gpt2", "pre": pre, "tokens": letters, "merges": []}
    parts = [*words, *(left + right for left, right in itertools.pairwise(words))]
    for word in dict.fromkeys(word.replace(" ", "Ġ") for word in parts):
        for end in range(2, len(word) + 1):
            if word[:end] not in facts["tokens"]:
                facts["tokens"] = [*facts["tokens"], word[:end]]
                facts["merges"] = [*facts["merges"], f"{word[: end - 1]} {word[end - 1]}"]
    tokenizer = Tokenizer.load(write(tmp_path / "a.gguf", **facts | {"merges": facts["merges"] or ["I t"]}))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_text(each) for each in ids] == words


def test_gguf_deepseek_llm_word_rule_round_trips_any_script(tmp_path):
    """Letters of other scripts are split from Latin ones, and Chinese characters form words of their own."""
    facts = byte_pair_facts(tmp_path) | {"pre": "deepseek-llm"}
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    assert content["model"]["merges"]
    tokenizer = Tokenizer.load(write(tmp_path / "a.gguf", **facts))
    for text in (*TEXTS, "Straße ΏΌ Å K 中文abc\u0905"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), False) == text


def test_gguf_pre_tokenizer_name_selects_nfc_normalization(tmp_path):
    facts = byte_pair_facts(tmp_path)
    composed = Tokenizer.load(write(tmp_path / "a.gguf", **facts | {"pre": "qwen2"}))
    plain = Tokenizer.load(write(tmp_path / "b.gguf", **facts | {"pre": "llama-bpe"}))
    assert composed.decode(composed.encode("e\u0301")) == "\u00e9"
    assert plain.decode(plain.encode("e\u0301")).endswith("e\u0301")


def test_gguf_chat_template_is_applied_and_unused_tokens_match_no_text(tmp_path):
    facts = byte_pair_facts(tmp_path)
    facts["tokens"] = [*facts["tokens"], "[PAD1]", "[PAD2]"]
    facts["token_type"] = [*facts["token_type"], 5, 5]
    tokenizer = Tokenizer.load(write(tmp_path / "a.gguf", template="{{ bos_token }}{{ messages[0].content }}", **facts))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|begin|>hi"
    assert tokenizer.token_bytes(len(facts["tokens"]) - 1) == b""
    assert len(tokenizer.encode("[PAD1]", add_special_tokens=False)) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "`tokenizer.ggml.model` must be one of llama, gpt2, bert: .* Given: 't5'"),
        ({"pre": "mamba"}, "`tokenizer.ggml.pre` must be one of llama-bpe, .*tokenizer_path .* Given: 'mamba'"),
        ({"pre": [1]}, "`tokenizer.ggml.pre` must be one of"),
        ({"tokens": []}, "`tokenizer.ggml.tokens` must hold at least one token"),
        ({"tokens": 3}, "`tokenizer.ggml.tokens` must be a list of texts. Given: 3"),
        ({"token_type": [1]}, "`tokenizer.ggml.token_type` must be a list of .* numbers, one for each token"),
        ({"merges": ["a b c"]}, "`tokenizer.ggml.merges` must list pairs of tokens that form a token. Found: 'a b c'"),
        ({"merges": ["ab"]}, "must list pairs of tokens"),
        ({"merges": 1}, "`tokenizer.ggml.merges` must be a list of texts"),
        ({"bos_token_id": 10**6}, "`tokenizer.ggml.bos_token_id` must be the id of one of"),
        ({"add_bos_token": 1}, "`tokenizer.ggml.add_bos_token` must be true or false"),
    ],
)
def test_gguf_refuses_inconsistent_byte_pairs(tmp_path, changes, message):
    path = write(tmp_path / "a.gguf", **byte_pair_facts(tmp_path) | changes)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value)


def test_gguf_refuses_duplicate_tokens(tmp_path):
    facts = byte_pair_facts(tmp_path)
    path = write(tmp_path / "a.gguf", **facts | {"tokens": [facts["tokens"][0], *facts["tokens"][:-1]]})
    with pytest.raises(ModelError, match=r"`tokenizer\.ggml\.tokens` must hold each text once"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "`tokenizer.ggml.scores` must be given"),
        ({"scores": [1.0]}, "`tokenizer.ggml.scores` must be a list of 2048 numbers"),
        ({"token_type": [1] * 2048, "unknown_token_id": None}, "must mark one token as the unknown token"),
        ({"token_type": [9] * 2048}, "`tokenizer.ggml.token_type` must be types from 1 to 6"),
        ({"tokens": ["<unk>"] * 2048}, "a.gguf: is not a sentencepiece model"),
        ({"tokens": ["\0", *sentencepiece_facts()["tokens"][1:]]}, "it has no unknown token"),
        ({"model": [1, 2]}, "`tokenizer.ggml.model` must be one of llama, gpt2, bert"),
    ],
)
def test_gguf_refuses_inconsistent_pieces(tmp_path, changes, message):
    facts = {key: value for key, value in (sentencepiece_facts() | changes).items() if value is not None}
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(write(tmp_path / "a.gguf", **facts))


def test_gguf_tokenizer_needs_no_architecture(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": [1, 2], **keys(**sentencepiece_facts())}, {}))
    assert Tokenizer.load(path).vocab_size == 2048


def test_gguf_tokenizer_path_replaces_the_tokenizer_of_the_file(tmp_path):
    facts = byte_pair_facts(tmp_path)
    own = write(tmp_path / "a.gguf", **facts)
    shipped = DEMO_FOLDER / "tokenizer.model"
    assert Tokenizer.load(own, shipped).encode("Add 17") == Tokenizer.load(DEMO_FOLDER).encode("Add 17")
    assert Tokenizer.load(DEMO_FOLDER, own).encode("hello") == Tokenizer.load(own).encode("hello")


def test_gguf_gemma_matches_added_space_tokens_and_ends_a_turn(tmp_path):
    """The unknown token is typed as a control token, and tokens of several spaces are written with spaces."""
    facts = sentencepiece_facts() | {"add_space_prefix": False, "add_bos_token": False}
    types = [3 if kind == 2 else kind for kind in facts["token_type"]]
    added = ["   ", "\n\n", "<end_of_turn>"]
    first = len(types)
    facts |= {
        "tokens": [*facts["tokens"], *added],
        "scores": [*facts["scores"], *[-1000.0] * 3],
        "token_type": [*types, 4, 4, 3],
    }
    ours = Tokenizer.load(write(tmp_path / "a.gguf", **facts))
    assert ours.encode("   \n\n<end_of_turn>") == [first, first + 1, first + 2]
    assert ours.decode(ours.encode("x   y\n\nz")) == "x   y\n\nz"
    assert ours.eos_token_ids == (facts["eos_token_id"], first + 2)
    model = load_config(None, [], str(DEMO_FOLDER)).model
    assert '2050 "<end_of_turn>" (tokenizer)' in describe_end_tokens(model, ours)
    named = Tokenizer.load(write(tmp_path / "b.gguf", **facts, eot_token_id=first))
    assert named.eos_token_ids == (facts["eos_token_id"], first)


def test_gguf_end_of_message_token_does_not_end_the_answer(tmp_path):
    facts = sentencepiece_facts()
    first = len(facts["tokens"])
    facts |= {
        "tokens": [*facts["tokens"], "<|end|>", "<|call|>", "<|return|>"],
        "scores": [*facts["scores"], *[-1000.0] * 3],
        "token_type": [*facts["token_type"], 3, 3, 3],
    }
    for named in ({}, {"eot_token_id": first}):
        ours = Tokenizer.load(write(tmp_path / "a.gguf", **facts, **named))
        assert ours.eos_token_ids == (facts["eos_token_id"], first + 1, first + 2)


def test_gguf_special_tokens_of_phi3_absorb_white_space(tmp_path):
    facts = sentencepiece_facts()
    facts |= {
        "tokens": [*facts["tokens"], "<|user|>", "<|endoftext|>"],
        "scores": [*facts["scores"], -1000.0, -1000.0],
        "token_type": [*facts["token_type"], 3, 3],
    }
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "phi3", **keys(**facts)}, {}))
    phi3, other = Tokenizer.load(path), Tokenizer.load(write(tmp_path / "b.gguf", **facts))
    assert phi3.encode("<|user|> \n x") == other.encode("<|user|>x")
    assert phi3.encode("<|endoftext|>\nx") == other.encode("<|endoftext|>\nx")


@pytest.mark.parametrize("named", [True, False])
def test_gguf_end_tokens_are_special_where_they_are_marked_as_user_defined(tmp_path, named):
    facts = byte_pair_facts(tmp_path)
    end = facts["eos_token_id"]
    facts["token_type"][end] = 4
    if not named:
        facts["tokens"][end] = "<|im_end|>"
        del facts["eos_token_id"]
    tokenizer = Tokenizer.load(write(tmp_path / "a.gguf", **facts))
    assert end in tokenizer.special_token_ids
    assert tokenizer.typed_text.insert_sentinels([{"role": "user", "content": facts["tokens"][end]}])[1]


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [*SPECIAL, "one", "two", "##s", "##1", "un", "cafe", "caf\u00e9", "One", ",", "[unused1]"]


def word_piece_facts(**facts):
    """Metadata of the converter: pieces that begin a word have a mark, others lose theirs."""
    marked = [text[2:] if text.startswith("##") else f"\u2581{text}" for text in PIECES[len(SPECIAL) :]]
    ids = {"padding_token_id": 0, "unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3, "mask_token_id": 4}
    types = [3] * len(SPECIAL) + [1] * len(marked)
    return {"model": "bert", "tokens": [*SPECIAL, *marked], "token_type": types, **ids, **facts}


@pytest.mark.parametrize("lowers", [True, False])
def test_gguf_word_pieces_equal_the_vocab_txt(tmp_path, lowers):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowers, "strip_accents": lowers}))
    facts = {} if lowers else {"normalizer.lowercase": False}
    ours, theirs = Tokenizer.load(write(tmp_path / "a.gguf", **word_piece_facts(**facts))), Tokenizer.load(tmp_path)
    for text in [*TEXTS, "ones, One two1s", "caf\u00e9 un-one [MASK] x"]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text, False) == theirs.encode(text, False), text
    assert ours.encode("One caf\u00e9") == [2, *([5, 10] if lowers else [12, 11]), 3]
    assert ours.encode_pair("one", "two") == theirs.encode_pair("one", "two")


def test_gguf_word_pieces_must_be_unique(tmp_path):
    facts = word_piece_facts()
    facts["tokens"][-1] = "\u2581one"
    with pytest.raises(ModelError, match="must have each piece once"):
        Tokenizer.load(write(tmp_path / "a.gguf", **facts))
