"""Parses one chat answer into reasoning, text and tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Final, NamedTuple

from llm_serving.core.enums import ReasoningFormatName
from llm_serving.text.tool_parsers import Call, Part, Thought, ToolParser
from llm_serving.text.tool_parsers.base import overlap


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The delimiters of a format in which models write their reasoning.

    `template_pattern`: regular expression that matches only chat templates of models with this format. A model has the
    first format in `REASONING_FORMATS` that matches. `answer`: delimiters around the answer, which models may omit;
    empty texts if the format has none. `opening_suffix`: text after the opening delimiter in prompts that ask for no
    reasoning. `special_tokens`: whether the delimiters are special tokens, which detokenization normally skips.
    `has_channels`: whether each part of an answer has a header that names its channel, as in gpt-oss. In such a format,
    reasoning may also follow text.
    """

    template_pattern: str
    opening: str = "<think>"
    closing: str = "</think>"
    answer: tuple[str, str] = ("", "")
    opening_suffix: str = ""
    special_tokens: bool = False
    has_channels: bool = False

    def is_open(self, prompt: str) -> bool:
        return prompt.rstrip().removesuffix(self.opening_suffix).endswith(self.opening)


THINK: Final = ReasoningFormat("</?think>")
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    ReasoningFormatName.HARMONY: ReasoningFormat(
        r"<\|channel\|>",
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        ("<|channel|>final<|message|>", ""),
        special_tokens=True,
        has_channels=True,
    ),
    ReasoningFormatName.SEED: ReasoningFormat(
        "<seed:think>",
        "<seed:think>",
        "</seed:think>",
        opening_suffix="<seed:cot_budget_reflect>",
        special_tokens=True,
    ),
    ReasoningFormatName.COHERE: ReasoningFormat(
        r"<\|START_THINKING\|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        special_tokens=True,
    ),
    ReasoningFormatName.MISTRAL: ReasoningFormat(r"\[THINK\]", "[THINK]", "[/THINK]", special_tokens=True),
    ReasoningFormatName.GRANITE: ReasoningFormat(
        "Here is my thought process:", "Here is my thought process:", "Here is my response:"
    ),
    ReasoningFormatName.GEMMA: ReasoningFormat(r"<\|channel>", "<|channel>thought", "<channel|>", special_tokens=True),
    ReasoningFormatName.MINICPM: ReasoningFormat(r"<\|thought_start\|>", "<|thought_start|>", "<|thought_end|>"),
    ReasoningFormatName.THINK_RESPONSE: ReasoningFormat(
        r"<response>(?:\\n|\n|</response>)", answer=("<response>", "</response>")
    ),
    ReasoningFormatName.THINK_ANSWER: ReasoningFormat(
        "(?s)<think>.*<answer>|<answer>.*<think>", answer=("<answer>", "</answer>")
    ),
    ReasoningFormatName.THINK: THINK,
}


@lru_cache(maxsize=16)
def reasoning_format_in(template: str) -> ReasoningFormat | None:
    return next((each for each in REASONING_FORMATS.values() if re.search(each.template_pattern, template)), None)


_MAX_SPACES: Final = 64


class Split(NamedTuple):
    """Reasoning and answer text that later pieces cannot change."""

    reasoning: str = ""
    answer: str = ""


class ReasoningParser:
    """Splits streamed text into reasoning and answer. The result does not depend on its division into pieces.

    `form`: the format, whose delimiters this description writes as `<think>` and `</think>`. A text that does not start
    with `<think>` has no reasoning. If `</think>` is missing, all text after `<think>` is reasoning. White space around
    the reasoning is dropped. `is_open`: whether the prompt ends with `<think>`, so that the text starts within it.
    """

    def __init__(self, form: ReasoningFormat = THINK, *, is_open: bool) -> None:
        self._opening, self._closing = form.opening, form.closing
        self._answer = _FramedAnswer(*form.answer) if form.answer[0] else None
        self._thinks: bool | None = True if is_open else None
        self._text = ""
        self._spaces: list[str] = []
        self._has_begun = False
        """Whether text was returned since the last `<think>` or `</think>`. Until then, white space is dropped."""

    def add(self, text: str) -> Split:
        """Add a piece of text, and return the text that later pieces cannot change."""
        if text.isspace() and not self._text and self._thinks is not False:
            self._spaces.append(text)
            return Split()
        return self._take(text, ended=False)

    def flush(self) -> Split:
        return self._take("", ended=True)

    def _take(self, text: str, *, ended: bool) -> Split:
        self._text = "".join([*self._spaces, self._text, text])
        self._spaces = []
        split = self._split(ended)
        if self._text.isspace():
            self._spaces, self._text = [self._text], ""
        if self._answer is not None and (ended or self._thinks is False):
            split = split._replace(answer=self._answer.add(split.answer, ended=ended))
        return split

    def _split(self, ended: bool) -> Split:
        if self._thinks is None:
            stripped = self._text.lstrip()
            if self._opening.startswith(stripped) and len(stripped) < len(self._opening) and not ended:
                return Split()
            self._thinks = stripped.startswith(self._opening)
            if self._thinks:
                self._text = stripped.removeprefix(self._opening)
            else:
                self._has_begun = True  # an answer without reasoning keeps its white space
        reasoning = ""
        if self._thinks:
            reasoning, found, rest = self._text.partition(self._closing)
            if not found:
                return self._think(ended)
            reasoning = self._strip_start(reasoning).rstrip()
            self._thinks, self._has_begun, self._text = False, False, rest
        answer, self._text = self._strip_start(self._text), ""
        self._has_begun = self._has_begun or bool(answer)
        return Split(reasoning, answer)

    def _think(self, ended: bool) -> Split:
        """Return reasoning text. Until the text has ended, hold back trailing white space and a partial `</think>`."""
        text = self._strip_start(self._text)
        kept = overlap(text, self._closing)
        released = text if ended else text[: len(text) - kept].rstrip()
        self._has_begun = self._has_begun or bool(released)
        self._text = text[len(released) :]
        return Split(reasoning=released.rstrip() if ended else released)

    def _strip_start(self, text: str) -> str:
        return text if self._has_begun else text.lstrip()


class _FramedAnswer:
    """Removes the delimiters of an answer that starts with `opening`, and the white space next to them."""

    def __init__(self, opening: str, closing: str) -> None:
        self._text, self._ended = "", False
        self._parts = self._read(opening, closing)

    def add(self, text: str, *, ended: bool) -> str:
        self._text += text
        self._ended = ended
        return "".join(takewhile(bool, self._parts))

    def _read(self, opening: str, closing: str) -> Iterator[str]:
        """Yield the parts of the answer, and an empty text if the next part needs more text."""
        while opening.startswith(stripped := self._text.lstrip()) and not self._ended:
            if len(self._text) - len(stripped) > _MAX_SPACES:
                break
            yield ""
        if stripped.startswith(opening) and len(self._text) - len(stripped) <= _MAX_SPACES:
            self._text = stripped.removeprefix(opening).removeprefix("\n")
            while closing not in self._text:
                kept = 0 if self._ended else max(overlap(self._text, each) for each in ("\n" + closing, closing))
                split = len(self._text) - kept
                part, self._text = self._text[:split], self._text[split:]
                yield part
            part, _, self._text = self._text.partition(closing)
            yield from filter(None, [part.removesuffix("\n")])
            while not (text := self._text.lstrip()):
                self._text = ""
                yield ""
            self._text = text
        while True:
            part, self._text = self._text, ""
            yield part


class AnswerParser:
    """Parses one answer into reasoning, text and tool calls. Drops calls after the first `max_calls`, if it is set."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, max_calls: int | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._num_calls = 0

    def add(self, text: str, *, ended: bool) -> list[Part]:
        """Add a piece of text. Return the non-empty parts that it completes, or all remaining parts if `ended`."""
        parts = self._parts(Split(answer=text) if self._reasoning is None else self._reasoning.add(text))
        if ended:
            parts += self._parts(Split() if self._reasoning is None else self._reasoning.flush())
            parts += [] if self._tools is None else self._tools.flush()
        return [part for part in parts if (self._is_within_limit(part) if isinstance(part, Call) else part)]

    def _is_within_limit(self, call: Call) -> bool:
        self._num_calls += bool(call.name)  # without a name it continues the previous call
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _parts(self, split: Split) -> list[Part]:
        thoughts: list[Part] = [Thought(split.reasoning)] if split.reasoning else []
        return thoughts + ([split.answer] if self._tools is None else self._tools.add(split.answer))
