"""Texts and calls keep their order, and arguments their text, for any division of an answer into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from llm_serving.text.answer_parser import AnswerParser, ReasoningParser
from llm_serving.text.tool_parsers import TOOL_FORMATS, Call, Part, Thought
from support.tool_cases import WRITERS

NAME = "größe_測る"
NAMES: dict[str, dict[str, Any]] = {NAME: {}, "add": {}}
ARGUMENTS = r'{"city": "Zürich 🚋 }{ \"[old]\" \\", "deep": {"a": ["]", "}", "é"]}}'
ADD = '{"a": 1}'
OrderedParts = list[tuple[str, str]]
"""(name, arguments) of a call, or ("", text), in order."""


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def mistral_list(*calls: tuple[str, str]) -> str:
    each = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"[TOOL_CALLS] [{', '.join(each)}]"


def glm(name: str, arguments: str) -> str:
    values = json.loads(arguments)
    texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in values.items()}
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{each}</arg_value>\n" for key, each in texts.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def glm_lines(name: str, arguments: str) -> str:
    return f"{name}\n{arguments}"


ANSWERS = [
    (
        "hermes",
        f"Vorher {{ü}}: {hermes(NAME, ARGUMENTS)}\ndann\n{hermes('add', ADD)}{hermes('add', ADD)} nachher <",
    ),
    (
        "hermes",
        f"{hermes('add', ADD)}<tool_call>no call</tool_call>{hermes(NAME, ARGUMENTS)[:-30]}",
    ),
    ("hermes", f'{hermes("add", ADD)} x <tool_call>{{"name": "ad'),
    ("hermes", hermes("add", '{"a": [<1}') + " nachher"),
    ("llama", f"{llama(NAME, ARGUMENTS)}; {llama('add', ADD)}"),
    (
        "llama",
        f"Vorher <|python_tag|>{llama(NAME, ARGUMENTS)} nachher <|python_tag|>{llama('add', ADD)[:-3]}",
    ),
    ("llama", f"{llama('add', ADD)}; {llama('other', ADD)}"),
    (
        "mistral",
        f"Vorher {mistral(NAME, ARGUMENTS)}dazwischen{mistral('add', ADD)}{mistral('add', ADD)} nachher [",
    ),
    (
        "mistral",
        f"Vorher {mistral_list((NAME, ARGUMENTS), ('add', ADD))} nachher {mistral('add', ADD)[:-3]}",
    ),
    ("mistral", f"{mistral('add', ADD)}[TOOL_CALLS] [{llama('add', ADD)}, "),
    (
        "glm",
        f"Vorher {glm(NAME, ARGUMENTS)}dazwischen\n{glm('add', ADD)}{glm('add', ADD)} nachher <tool_call",
    ),
    ("glm", f"{glm('add', ADD)} x {glm(NAME, ARGUMENTS)[:-14]}"),
    ("glm_lines", f"{glm_lines(NAME, ARGUMENTS)}<|assistant|>{glm_lines('add', ADD)}"),
    (
        "glm_lines",
        f"{glm_lines('add', ADD)}<|assistant|>{glm_lines(NAME, ARGUMENTS)[:-5]}",
    ),
    *((form, f"Vorher {write((NAME, ARGUMENTS), ('add', ADD))} nachher <") for form, write in WRITERS.items()),
    *(
        (form, f"{write(('add', ADD))} x {write(('add', ADD), (NAME, ARGUMENTS))[:-30]}")
        for form, write in WRITERS.items()
    ),
]


def parse(form: str, pieces: Sequence[str]) -> OrderedParts:
    parser = TOOL_FORMATS[form].create(NAMES)
    parts: list[Part] = [part for piece in pieces for part in parser.add(piece)]
    return in_order([*parts, *parser.flush()])


def in_order(parts: Sequence[Part]) -> OrderedParts:
    joined: OrderedParts = []
    for part in parts:
        if isinstance(part, Call) and part.name:
            joined.append((part.name, part.arguments))
        elif isinstance(part, Call) or (joined and not joined[-1][0]):
            assert joined, "what goes on with no call"
            assert bool(joined[-1][0]) == isinstance(part, Call), "arguments come behind what was said after their call"
            text = part.arguments if isinstance(part, Call) else part
            joined[-1] = (joined[-1][0], joined[-1][1] + text)
        else:
            joined.append(("", part))
    return joined


def cut(text: str, at: Sequence[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *at, len(text)])]


@pytest.mark.parametrize(("form", "text"), ANSWERS)
def test_parser_order_and_arguments_are_independent_of_text_pieces(form: str, text: str) -> None:
    whole = parse(form, [text])
    assert any(name for name, _ in whole)
    assert parse(form, list(text)) == whole
    for at in range(1, len(text)):
        assert parse(form, cut(text, [at])) == whole, at
    for size in range(2, 18):
        assert parse(form, cut(text, range(size, len(text), size))) == whole, size
    for ends in combinations(range(1, len(text), 7), 2):
        assert parse(form, cut(text, ends)) == whole, ends


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral", "glm_lines", "deepseek", "deepseek_fenced", "kimi"])
def test_arguments_are_streamed_unchanged(form: str) -> None:
    write: Any = globals().get(form)
    text = WRITERS[form]((NAME, ARGUMENTS)) if write is None else write(NAME, ARGUMENTS)
    assert parse(form, [text]) == [(NAME, ARGUMENTS)]


@pytest.mark.parametrize(("form", "text"), ANSWERS)
def test_reasoning_precedes_calls_for_any_text_pieces(form: str, text: str) -> None:
    answer = f"<think>\nRufe {{ich}} {text[:40]} ?\n</think>\n\n{text}"

    def parts_of(pieces: Sequence[str]) -> tuple[str, OrderedParts]:
        parser = AnswerParser(ReasoningParser(is_open=False), TOOL_FORMATS[form].create(NAMES), None)
        reasoning, parts = "", list[Part]()
        for number, piece in enumerate(pieces, 1):
            for part in parser.add(piece, ended=number == len(pieces)):
                assert part
                if isinstance(part, Thought):
                    assert not parts, "a thought behind the answer"
                    reasoning += part.text
                else:
                    parts.append(part)
        return reasoning, in_order(parts)

    whole = parts_of([answer])
    assert whole[0].startswith("Rufe {ich}")
    assert any(name for name, _ in whole[1])
    assert parts_of(list(answer)) == whole
    for at in range(1, len(answer)):
        assert parts_of(cut(answer, [at])) == whole, at
