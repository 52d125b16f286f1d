"""What guesses a longer search would bring: python performance/lookup_lengths.py

Tokens a step, counted without a model: the shipped model's long answers are said token by token, and of at most sixteen
guesses those count that are right up to the first wrong one. Look-ups by two lengths, as the server makes them, against
the longest match in all that has been said, which is what a suffix tree finds; each text the first time and once more.
Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Protocol

from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.speculation.finished_answers import FinishedAnswers
from llm_serving.speculation.lookup import Lookup
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from workload import DEMO_QUESTIONS, load

MAX_GUESSES: Final = 16
LENGTH: Final = 3
LONGEST: Final = 64
"""Tokens of a match that are compared."""

Text = Sequence[int]


class Guesser(Protocol):
    def begin(self, prompt: Text) -> None: ...
    def guess(self) -> list[int]: ...
    def take(self, token_id: int) -> None: ...
    def end(self, answer: Text) -> None: ...


class TwoLengths:
    """As the server does."""

    def __init__(self) -> None:
        self._finished = FinishedAnswers(LENGTH, 2**18)

    def begin(self, prompt: Text) -> None:
        self._lookup = Lookup(prompt, "", LENGTH, self._finished)
        self._lookup.look()

    def guess(self) -> list[int]:
        return self._lookup.guess(MAX_GUESSES)

    def take(self, token_id: int) -> None:
        self._lookup.append(token_id)
        if not self._lookup.has_guess:
            self._lookup.look()

    def end(self, answer: Text) -> None:
        self._finished.add([("", tuple(answer))])


class LongestMatch:
    """What followed the longest match, of `LENGTH` tokens at least; of equally long ones the newest."""

    def __init__(self) -> None:
        self._finished: dict[Text, list[tuple[Text, int]]] = defaultdict(list)

    def begin(self, prompt: Text) -> None:
        self._said: list[int] = []
        self._places: dict[Text, list[tuple[Text, int]]] = defaultdict(list)
        for token_id in prompt:
            self.take(token_id)

    def guess(self) -> list[int]:
        key = tuple(self._said[-LENGTH:])
        found = [*self._finished.get(key, ()), *self._places.get(key, ())]
        if not found:
            return []
        _, _, text, index = max(
            (self._length(text, index), place, text, index) for place, (text, index) in enumerate(found)
        )
        guessed = list(text[index : index + MAX_GUESSES])
        while text is self._said and len(guessed) < MAX_GUESSES:
            guessed += guessed[: MAX_GUESSES - len(guessed)]
        return guessed

    def take(self, token_id: int) -> None:
        if len(self._said) >= LENGTH:
            self._places[tuple(self._said[-LENGTH:])].append((self._said, len(self._said)))
        self._said.append(token_id)

    def end(self, answer: Text) -> None:
        for index in range(LENGTH, len(answer)):
            self._finished[tuple(answer[index - LENGTH : index])].append((answer, index))

    def _length(self, text: Text, index: int) -> int:
        length = LENGTH
        while length < min(LONGEST, index, len(self._said)) and text[index - length - 1] == self._said[-length - 1]:
            length += 1
        return length


def main() -> int:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    questions = [each for each in load(DEMO_QUESTIONS) if len(each.reference) > 100]
    texts = [(tokenizer.encode(each.text), tokenizer.encode(each.reference, False)) for each in questions]
    guessers: dict[str, Guesser] = {"two lengths": TwoLengths(), "longest match": LongestMatch()}
    for name, guesser in guessers.items():
        for time in ("the first time", "once more"):
            num_steps = sum(steps_of(guesser, prompt, answer) for prompt, answer in texts)
            print(
                f"{name}, {time}: {sum(len(answer) for _, answer in texts) / num_steps:.2f} tokens a step", flush=True
            )
    return 0


def steps_of(guesser: Guesser, prompt: Text, answer: Text) -> int:
    """Steps in which an answer is said."""
    guesser.begin(prompt)
    num_steps, place = 0, 0
    while place < len(answer):
        guesses = guesser.guess() if place else []  # the first token comes with the prompt
        num_right = 0
        while num_right < len(guesses) and answer[place + num_right : place + num_right + 1] == [guesses[num_right]]:
            num_right += 1
        for token_id in answer[place : place + num_right + 1]:
            guesser.take(token_id)
        place, num_steps = place + num_right + 1, num_steps + 1
    guesser.end(answer)
    return num_steps


if __name__ == "__main__":
    sys.exit(main())
