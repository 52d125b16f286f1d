"""Reasoning is separated from the answer, for any division of the text into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.text.answer_parser import REASONING_FORMATS, ReasoningParser, reasoning_format_in


def split(text: str, cuts: Sequence[int] = (), *, form: str = "think", is_open: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(REASONING_FORMATS[form], is_open=is_open)
    edges = [0, *sorted(cuts), len(text)]
    parts = [parser.add(text[start:end]) for start, end in pairwise(edges)]
    parts.append(parser.flush())
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "answer"),
    [
        ("<think>\nTwo and two.\n</think>\n\nFour.\n", False, "Two and two.", "Four.\n"),
        ("\n<think></think>Four.", False, "", "Four."),
        ("Two and two.\n</think>\n\nFour.", True, "Two and two.", "Four."),
        (" Four. <think>no</think>", False, "", " Four. <think>no</think>"),
        ("<think>first</think> a <think>b</think>", False, "first", "a <think>b</think>"),
        ("<think>never done </thi", False, "never done </thi", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_split_from_the_answer(text: str, is_open: bool, reasoning: str, answer: str) -> None:
    assert split(text, is_open=is_open) == (reasoning, answer)


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "answer"),
    [
        ("seed", "<seed:think>Two and two.</seed:think>\nFour.", "Two and two.", "Four."),
        ("mistral", "[THINK]Two and two.[/THINK]Four.", "Two and two.", "Four."),
        ("granite", "Here is my thought process: Two.\n\nHere is my response: Four.", "Two.", "Four."),
        ("granite", "Here is my answer: Four.", "", "Here is my answer: Four."),
        ("minicpm", "<|thought_start|>\nTwo.\n<|thought_end|>\nFour.", "Two.", "Four."),
        ("gemma", "<|channel>thought\nTwo.\n<channel|>Four.", "Two.", "Four."),
        ("cohere", "<|START_THINKING|>Two.<|END_THINKING|><|START_RESPONSE|>Four.<|END_RESPONSE|>", "Two.", "Four."),
        ("cohere", "<|START_RESPONSE|>Four.<|END_RESPONSE|>", "", "Four."),
        ("cohere", "<|START_THINKING|>Two.<|END_THINKING|><|START_ACTION|>[]", "Two.", "<|START_ACTION|>[]"),
        ("think_response", "<think>\nTwo.\n</think>\n\n<response>\nFour.\n\n</response>\n", "Two.", "Four.\n"),
        ("think_response", "<think>Two.</think>\nFour. <response>", "Two.", "Four. <response>"),
        ("think_response", "<think>Two.</think><response>Four.", "Two.", "Four."),
        ("think_response", "<response>Four.</response>\n\n<tool_call>", "", "Four.<tool_call>"),
        ("think_answer", "<think>\nTwo.\n</think>\n<answer>\nFour.\n</answer>", "Two.", "Four."),
    ],
)
def test_reasoning_of_each_format_is_split_from_the_answer(form: str, text: str, reasoning: str, answer: str) -> None:
    assert split(text, form=form) == (reasoning, answer)
    assert split(text, range(len(text)), form=form) == (reasoning, answer)


COMMON = [" ", "\n", "a", "<", "b c", "</", *" \n"]


@pytest.mark.parametrize("form", [name for name, each in REASONING_FORMATS.items() if not each.has_channels])
@given(is_open=st.booleans(), data=st.data())
def test_reasoning_split_is_independent_of_text_pieces(form: str, is_open: bool, data: st.DataObject) -> None:
    about = REASONING_FORMATS[form]
    marks = [mark for mark in (about.opening, about.closing, *about.answer) if mark]
    fragments = st.sampled_from([*COMMON, *marks, *(mark[:4] for mark in marks), *(mark[4:] for mark in marks)])
    text = data.draw(st.lists(fragments, max_size=16).map("".join))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=len(text)))
    whole = split(text, form=form, is_open=is_open)
    assert split(text, cuts, form=form, is_open=is_open) == whole
    assert split(text, range(len(text)), form=form, is_open=is_open) == whole


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<think>\\n' }}", "think"),
        ("{% if '</think>' in content %}", "think"),
        ("<minimax:tool_call> {{- '\\n<response>' }} </think>", "think"),
        ("'<think>\\n' + reasoning + '</think>\\n\\n<response>\\n'", "think_response"),
        ("between <think></think> and between <response></response>", "think_response"),
        ("content.split('<answer>') '<think>\\n\\n</think>'", "think_answer"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("'<seed:think>'", "seed"),
        ("<|START_THINKING|> <|START_RESPONSE|>", "cohere"),
        ("'[THINK]' + block", "mistral"),
        ("after 'Here is my thought process:' and", "granite"),
        ("'<|channel>thought\\n<channel|>'", "gemma"),
        ("'<|thought_start|>\\n' + message.thought", "minicpm"),
        ("{{ messages }}", None),
    ],
)
def test_chat_template_selects_reasoning_format(template: str, form: str | None) -> None:
    assert reasoning_format_in(template) == (None if form is None else REASONING_FORMATS[form])


@pytest.mark.parametrize(
    ("form", "prompt", "is_open"),
    [
        ("think", "assistant\n<think>\n", True),
        ("think", "assistant\n</think>\n", False),
        ("seed", "assistant\n<seed:think><seed:cot_budget_reflect>", True),
        ("seed", "assistant\n", False),
    ],
)
def test_prompt_may_end_with_the_start_of_reasoning(form: str, prompt: str, is_open: bool) -> None:
    assert REASONING_FORMATS[form].is_open(prompt) == is_open


@pytest.mark.parametrize(("begin", "is_open"), [("", False), ("", True), ("<think>", False), ("a", True)])
def test_reasoning_parser_time_is_linear_in_white_space(begin: str, is_open: bool) -> None:
    parser, spaces = ReasoningParser(is_open=is_open), "\n \n"
    pieces = [parser.add(begin)]
    for _ in range(1000):
        pieces.append(parser.add(spaces))
        assert len(parser._text) < 10
    pieces += [parser.add("</think>b"), parser.flush()]
    whole = split(f"{begin}{1000 * spaces}</think>b", is_open=is_open)
    assert ("".join(each.reasoning for each in pieces), "".join(each.answer for each in pieces)) == whole


@pytest.mark.parametrize("spaces", [63, 64, 65, 100])
def test_limit_of_white_space_before_a_framed_answer_is_the_same_for_all_splits(spaces: int) -> None:
    text = " " * spaces + "<answer>hi</answer>"

    def parsed(pieces: list[str]) -> str:
        parser = ReasoningParser(REASONING_FORMATS["think_answer"], is_open=False)
        return "".join(split.answer for split in [*map(parser.add, pieces), parser.flush()])

    expected = "hi" if spaces <= 64 else text
    assert {parsed([text[:at], text[at:]]) for at in range(len(text))} | {parsed(list(text))} == {expected}
