"""What a longer n-gram match would gain: python performance/lookup_lengths.py

Tokens per step, counted without a model: the long answers of the shipped model are generated token by token; of at most
sixteen draft tokens those up to the first wrong one are accepted. Lookups by two lengths, as in the server, are
compared with the longest match in all texts so far, which a suffix tree finds; each text the first time and once more.
Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Protocol

from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.speculation.ngram import FinishedAnswersIndex, NgramLookup
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from workload import DEMO_QUESTIONS, load

MAX_DRAFT_TOKENS: Final = 16
LENGTH: Final = 3
LONGEST: Final = 64
"""Tokens of a match that are compared."""

Text = Sequence[int]


class TextProposer(Protocol):
    def start(self, prompt: Text) -> None: ...
    def propose(self) -> list[int]: ...
    def append(self, token_id: int) -> None: ...
    def finish(self, answer: Text) -> None: ...


class TwoLengths:
    """The proposer of the server."""

    def __init__(self) -> None:
        self._finished = FinishedAnswersIndex(LENGTH, 2**18)

    def start(self, prompt: Text) -> None:
        self._lookup = NgramLookup(prompt, "", LENGTH, self._finished)
        self._lookup.search()

    def propose(self) -> list[int]:
        return self._lookup.propose(MAX_DRAFT_TOKENS)

    def append(self, token_id: int) -> None:
        self._lookup.advance([token_id])
        if not self._lookup.has_draft:
            self._lookup.search()

    def finish(self, answer: Text) -> None:
        self._finished.add([("", tuple(answer))])


class LongestMatch:
    """Proposes what followed the longest match of at least `LENGTH` tokens; of equally long ones the newest."""

    def __init__(self) -> None:
        self._finished: dict[Text, list[tuple[Text, int]]] = defaultdict(list)

    def start(self, prompt: Text) -> None:
        self._text: list[int] = []
        self._positions: dict[Text, list[tuple[Text, int]]] = defaultdict(list)
        for token_id in prompt:
            self.append(token_id)

    def propose(self) -> list[int]:
        key = tuple(self._text[-LENGTH:])
        found = [*self._finished.get(key, ()), *self._positions.get(key, ())]
        if not found:
            return []
        _, _, text, index = max(
            (self._length(text, index), number, text, index) for number, (text, index) in enumerate(found)
        )
        draft = list(text[index : index + MAX_DRAFT_TOKENS])
        while text is self._text and len(draft) < MAX_DRAFT_TOKENS:
            draft += draft[: MAX_DRAFT_TOKENS - len(draft)]
        return draft

    def append(self, token_id: int) -> None:
        if len(self._text) >= LENGTH:
            self._positions[tuple(self._text[-LENGTH:])].append((self._text, len(self._text)))
        self._text.append(token_id)

    def finish(self, answer: Text) -> None:
        for index in range(LENGTH, len(answer)):
            self._finished[tuple(answer[index - LENGTH : index])].append((answer, index))

    def _length(self, text: Text, index: int) -> int:
        length = LENGTH
        while length < min(LONGEST, index, len(self._text)) and text[index - length - 1] == self._text[-length - 1]:
            length += 1
        return length


def main() -> int:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    questions = [each for each in load(DEMO_QUESTIONS) if len(each.reference) > 100]
    texts = [(tokenizer.encode(each.text), tokenizer.encode(each.reference, False)) for each in questions]
    proposers: dict[str, TextProposer] = {"two lengths": TwoLengths(), "longest match": LongestMatch()}
    for name, proposer in proposers.items():
        for time in ("the first time", "once more"):
            num_steps = sum(steps_of(proposer, prompt, answer) for prompt, answer in texts)
            print(
                f"{name}, {time}: {sum(len(answer) for _, answer in texts) / num_steps:.2f} tokens a step", flush=True
            )
    return 0


def steps_of(proposer: TextProposer, prompt: Text, answer: Text) -> int:
    """Return the number of steps that generate an answer."""
    proposer.start(prompt)
    num_steps, position = 0, 0
    while position < len(answer):
        draft = proposer.propose() if position else []  # the first token comes with the prompt
        num_accepted = 0
        for draft_token, token_id in zip(draft, answer[position:], strict=False):
            if draft_token != token_id:
                break
            num_accepted += 1
        for token_id in answer[position : position + num_accepted + 1]:
            proposer.append(token_id)
        position, num_steps = position + num_accepted + 1, num_steps + 1
    proposer.finish(answer)
    return num_steps


if __name__ == "__main__":
    sys.exit(main())
