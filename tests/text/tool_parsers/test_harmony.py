"""Answers with channels: reasoning, content and calls, for any division of a text into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.text.answer_parser import AnswerParser
from llm_serving.text.tool_parsers import Call, Part, Thought
from llm_serving.text.tool_parsers.harmony import HarmonyParser

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
THOUGHT, ADD = Thought("Hm."), Call("add", '{"a": "<|end|>"}')


def parts_of(
    text: str, cuts: Sequence[int] = (), *, names: tuple[str, ...] | None = ("add",), **options: bool
) -> list[Part]:
    parser = AnswerParser(None, HarmonyParser(names, **options), None)
    edges = [0, *sorted(cuts), len(text)]
    parts: list[Part] = []
    for number, (start, end) in enumerate(pairwise(edges), 1):
        for part in parser.add(text[start:end], ended=number == len(edges) - 1):
            last = parts[-1] if parts else None
            if isinstance(part, str) and isinstance(last, str):
                parts[-1] = last + part
            elif isinstance(part, Thought) and isinstance(last, Thought):
                parts[-1] = Thought(last.text + part.text)
            elif isinstance(part, Call) and isinstance(last, Call) and not part.name:
                parts[-1] = last._replace(arguments=last.arguments + part.arguments)
            else:
                parts.append(part)
    return parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", [THOUGHT, "Yes."]),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.<|return|>", [THOUGHT, "Yes."]),
        (f"{ANALYSIS}Hm.", [THOUGHT]),
        (f"{ANALYSIS}Hm.{FINAL}Yes.", [THOUGHT, "Yes."]),
        (f"{ANALYSIS}Hm.{NEXT}{CALL}{ADD.arguments}", [THOUGHT, ADD]),
        (f"{CALL}\n{ADD.arguments}\n<|call|>", [ADD]),
        (f" to=functions.add<|channel|>commentary json<|message|>{ADD.arguments}<|call|>", [ADD]),
        (f"<|start|>assistant<|channel|>analysis to=functions.add code<|message|>{ADD.arguments}", [ADD]),
        (f"<|channel|>commentary to=add<|message|>{ADD.arguments}", [ADD]),
        (f"{ANALYSIS}Hm.{NEXT}{PREAMBLE}I look.{NEXT}{CALL}{{}}<|call|>", [THOUGHT, "I look.", Call("add", "{}")]),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{PREAMBLE}c{NEXT}{FINAL}d", [Thought("a\n\nb"), "c\n\nd"]),
        (f"{CALL}{{}}<|call|><|start|>assistant{CALL}{{}}", [Call("add", "{}"), Call("add", "{}")]),
        (f"{CALL.replace('.add', '.other')}{{}}<|call|>", [Call("other", "{}")]),
        ("<|channel|>commentary to=browser.search code<|message|>{}", ["{}"]),
        (f"{FINAL}a<b <|x|> <|", ["a<b <|x|> <|"]),
        # What is no message is text.
        ("Yes.", ["Yes."]),
        ("<|channel|>", []),
        ("<|channel|>final", []),
        ("<|channel|>?", ["<|channel|>?"]),
        ("to=be", ["to=be"]),
        ("<|start|><|<|start|>", ["<|start|><|"]),
        (f"<|channel|>{'x' * 600}<|message|>b", [f"<|channel|>{'x' * 600}<|message|>b"]),
        (f"{CALL}no object<|call|>", ["no object"]),
        (f"{CALL.replace('.add', '.other')}{{a}}<|call|>", ["{a}"]),
        (f'{CALL}{{"a": ]<|call|>', [Call("add", '{"a": '), "]"]),
        (f"{CALL}{{}} more<|call|>", [Call("add", "{}"), "more"]),
    ],
)
def test_harmony_splits_an_answer_into_reasoning_text_and_calls(text: str, parts: list[Part]) -> None:
    assert parts_of(text) == parts
    assert parts_of(text, range(len(text))) == parts


def test_harmony_returns_calls_as_text_without_tools() -> None:
    assert parts_of(f"{ANALYSIS}Hm.{NEXT}{CALL}{{}}<|call|>", names=None) == [THOUGHT, "{}"]


def test_harmony_keeps_reasoning_in_the_text_without_a_reasoning_parser() -> None:
    assert parts_of(f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", thinks=False) == ["Hm.\n\nYes."]


def test_harmony_continues_reasoning_opened_by_the_prompt() -> None:
    assert parts_of(f"Hm.{NEXT}{FINAL}Yes.", in_thought=True) == [THOUGHT, "Yes."]


MARKS = [f"<|{each}|>" for each in ("start", "channel", "message", "constrain", "end", "call", "return")]
WORDS = [
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=functions.",
    "add",
    "{}",
    '{"a":',
    " ",
    "\n",
    "<|",
    "x",
    "é",
]


@given(data=st.data(), text=st.lists(st.sampled_from([*MARKS, *WORDS, ANALYSIS, CALL]), max_size=24).map("".join))
def test_harmony_parts_are_independent_of_text_pieces(data: st.DataObject, text: str) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=len(text)))
    whole = parts_of(text)
    assert parts_of(text, cuts) == whole
    assert parts_of(text, range(len(text))) == whole


@given(texts=st.lists(st.text(st.characters(exclude_characters="<"), min_size=1), min_size=1, max_size=6))
def test_harmony_loses_no_text_of_a_message(texts: list[str]) -> None:
    channels = [ANALYSIS, PREAMBLE, FINAL, CALL]
    answer = NEXT.join(channels[i % 4] + text for i, text in enumerate(texts))
    parts = parts_of(answer)
    joined = "".join(part.arguments if isinstance(part, Call) else getattr(part, "text", part) for part in parts)
    shown = "".join(joined.split())
    for text in texts:  # a blank line may separate the arguments of a call from text that follows them
        assert "".join(text.split()) in shown
