from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("llm_serving", "llm_serving_receipts", "llm_serving_simulator", "llm_serving_tools")
PRIVATE_WORDS = {
    "guess": "draft token, or propose",
    "guesses": "draft tokens",
    "guesser": "proposer",
    "knock": "admission check",
    "visitor": "client identity",
    "appointment": "retry reservation",
    "comeback": "Retry-After",
    "comebacks": "Retry-After",
    "whoever": "the client, the request or the tenant",
    "somebody": "another client or request",
    "sketch": "weight fingerprint",
    "parting": "graceful close",
    "widened": "weight-only quantized",
    "beginnings": "prefix keys",
}
"""Word that an identifier must not contain -> what to write in its place."""
SAME_NAME = {"Blocks", "Flag", "Reloaded", "Resumed"}
"""Class names that two modules may have: messages and records, whose names are part of a format on disk or wire."""


def sources() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (PROJECT / "llm-serving" / name).rglob("*.py"))


def words_of(name: str) -> list[str]:
    """Return the words of an identifier, in lower case: `RequestLookup2` has request and lookup."""
    return re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())


def test_identifier_is_split_into_words() -> None:
    assert words_of("_NumGuesses_of2") == ["num", "guesses", "of"]


def test_identifiers_use_standard_terms() -> None:
    found = []
    for path in sources():
        text = path.read_text()
        lower = text.lower()
        if not any(word in lower for word in PRIVATE_WORDS):  # a hundredth of the time that its tokens take
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                found += [
                    f"{path.relative_to(PROJECT)}:{token.start[0]}: `{token.string}`: write {PRIVATE_WORDS[word]}"
                    for word in words_of(token.string)
                    if word in PRIVATE_WORDS
                ]
    assert found == []


def test_keys_of_the_configuration_use_standard_terms() -> None:
    keys = re.findall(r"^ *(\w+):", (PROJECT / "configs" / "serving.yaml").read_text(), re.MULTILINE)
    assert len(keys) > 100
    assert [key for key in keys if set(words_of(key)) & set(PRIVATE_WORDS)] == []


def test_public_class_names_are_unique() -> None:
    modules = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in SAME_NAME:
                modules[node.name].append(str(path.relative_to(PROJECT)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
