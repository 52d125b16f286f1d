"""Special tokens in messages as characters, with tokenizers of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from llm_serving.text.tokenizer.typed_text import TypedText

FOLDERS = sorted(each for each in (Path(__file__).parents[1] / "tokenizers").iterdir() if each.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_typed_text_keeps_special_tokens_of_the_template_only(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    special = special_texts(tokenizer)
    first, last = special[0], special[-1]
    for text in special[:8]:
        typed = f"one {text}two{text}{text} \n{text}"
        [message], sentinel = tokenizer.typed_text.insert_sentinels([{"role": text, "content": typed}])
        assert (message["role"], message["content"].replace(sentinel, "")) == (text, typed)
        ids = tokenizer.typed_text.encode(f"{first}{message['content']}{last}end", sentinel, add_special_tokens=False)
        control = [tokenizer.token_bytes(each).decode() for each in ids if each in tokenizer.special_token_ids]
        assert control == [first, last]
        shown = shown_text(tokenizer, ids)
        if " " in shown_text(tokenizer, tokenizer.encode(f"{first}x", add_special_tokens=False)):
            # The vocabulary puts a space behind control tokens.
            assert shown in (f"{first} {typed}{last} end", f"{first} {typed}{last}end")
        else:
            assert shown == f"{first}{typed}{last}end"


def shown_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def special_texts(tokenizer: Tokenizer) -> list[str]:
    """Return the texts of special tokens that the tokenizer recognises in a text."""
    texts = {each: tokenizer.token_bytes(each).decode() for each in sorted(tokenizer.special_token_ids)}
    found = [text for each, text in texts.items() if tokenizer.encode(text, add_special_tokens=False) == [each]]
    assert found
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_typed_text_adds_expected_special_tokens_once(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = special_texts(tokenizer)[0]
    [message], sentinel = tokenizer.typed_text.insert_sentinels([{"role": "user", "content": f"a {text} b"}])
    own = tokenizer.typed_text.encode(message["content"], sentinel, add_special_tokens=False)
    whole = tokenizer.typed_text.encode(message["content"], sentinel, add_special_tokens=True)
    added = tokenizer.encode("a", add_special_tokens=True)
    for each in tokenizer.encode("a", add_special_tokens=False):
        added.remove(each)
    assert sorted(whole) == sorted([*own, *added])


def test_typed_text_inserts_sentinels_in_every_text_but_roles() -> None:
    tokenizer = Tokenizer.load(FOLDERS[0])
    text = special_texts(tokenizer)[0]
    call = {"function": {"name": text, "arguments": {text: [text, 5, None, True]}}}
    messages = [
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "tool", "name": text, "content": text},
    ]
    changed, sentinel = tokenizer.typed_text.insert_sentinels(messages)
    assert sentinel and len(sentinel) == 32
    assert repr(changed).count(sentinel) == 5
    assert text not in repr(changed)
    assert repr(changed).replace(sentinel, "") == repr(messages)


@pytest.mark.parametrize("typed", ["<a<b>", "<<a<b>b>", "<a<a<b>", "x<a<b><b>"])
def test_typed_text_inserts_sentinels_in_overlapping_special_tokens(typed: str) -> None:
    text = TypedText(lambda text, _: list(text.encode()), {"<a<": 256, "<b>": 257, "<a<b>b>": 258}, bytes)
    [message], sentinel = text.insert_sentinels([{"role": "user", "content": typed}])
    assert message["content"].replace(sentinel, "") == typed
    assert not any(special in message["content"] for special in ("<a<", "<b>"))


def test_typed_text_leaves_messages_without_special_tokens_unchanged() -> None:
    tokenizer = Tokenizer.load(FOLDERS[0])
    messages = [{"role": "user", "content": "<|not_a_token|>", "name": None}]
    assert tokenizer.typed_text.insert_sentinels(messages) == (messages, "")


@pytest.mark.parametrize("special", ["ab", "<0", "00"])
def test_inserting_a_sentinel_ends_even_if_it_contains_a_special_token(
    special: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda count: "0ab" * count)
    typed = TypedText(lambda text, _: [ord(char) for char in text], {special: 1}, lambda _: b"")
    [message], sentinel = typed.insert_sentinels([{"role": "user", "content": f"x{special}{special}"}])
    cut = f"{special[0]}{sentinel}{special[1]}"
    assert message["content"].startswith(f"x{cut}")
    assert not any(special in part for part in message["content"].split(sentinel))


def test_typed_text_finds_special_tokens_among_thousands() -> None:
    special = {f"<unused{i}>": i for i in range(5000)} | {"[INST]": 5000, "]\n": 5001}
    typed = TypedText(lambda text, _: list(text.encode()), special, lambda _: b"")
    text = "The quick brown fox jumps over the lazy dog. " * 500
    assert typed.insert_sentinels([{"role": "user", "content": text}])[1] == ""
    [message], sentinel = typed.insert_sentinels([{"role": "user", "content": f"{text}<unused4999>[INST]\n"}])
    assert message["content"] == f"{text}<{sentinel}unused4999>[{sentinel}INST]{sentinel}\n"
