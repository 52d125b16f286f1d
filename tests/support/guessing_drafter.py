"""Guesses of what the fake model says: mostly right, now and then wrong, as many as it likes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from llm_serving.core.request import Request
from llm_serving.core.window import NO_WINDOW
from llm_serving.speculation import Drafter
from llm_serving.speculation.finished_answers import FinishedAnswers
from support.fake_runner import VOCAB_SIZE, next_token, seen

MAX_DRAFTS = 7
FINISHED_TOKENS = 2**10
"""None is looked up; the table of the real one costs more than a whole seed of `simulation.py`."""


class GuessingDrafter(Drafter):
    """Pays whenever it says so; its guesses are wrong at `wrong` of all places."""

    def __init__(self, rng: random.Random, wrong: float = 0.2, window: int = NO_WINDOW) -> None:
        self._rng, self._wrong, self._window = rng, wrong, window
        super().__init__(MAX_DRAFTS, 3, finished=FinishedAnswers(3, FINISHED_TOKENS))

    @property
    def pays(self) -> bool:
        return self._rng.random() < 0.8

    @pays.setter
    def pays(self, value: bool) -> None:
        pass

    def drafts(self, num_running: int, *, waits: bool) -> list[tuple[Request, list[int]]]:
        del num_running, waits  # whoever has a token on its way gets none from the scheduler
        drafted = [(request, self._guess_of(request)) for request in self._states if request.is_decoding]
        return [each for each in drafted if self._rng.random() < 0.9]

    def _guess_of(self, request: Request) -> list[int]:
        """Behind a wrong token the model says something else, which is guessed as well as before."""
        token_ids = request.prompt_token_ids + request.output_token_ids
        guessed = []
        for _ in range(self._rng.randint(0, MAX_DRAFTS)):
            token_id = self._next_of(request, token_ids)
            if self._rng.random() < self._wrong:
                token_id = self._rng.randrange(VOCAB_SIZE)
            guessed.append(token_id)
            token_ids.append(token_id)
        return guessed

    def _next_of(self, request: Request, token_ids: list[int]) -> int:
        return next_token(seen(token_ids, self._window), request.sampling.seed % 2**63)


class ToldDrafter(GuessingDrafter):
    """Has been told each answer: guesses it, mostly, whatever chooses the tokens."""

    def __init__(self, rng: random.Random, answers: Mapping[str, Sequence[int]], wrong: float = 0.2) -> None:
        """`answers`: by request id."""
        super().__init__(rng, wrong)
        self._answers = answers

    def _next_of(self, request: Request, token_ids: list[int]) -> int:
        answer, place = self._answers[request.request_id], len(token_ids) - request.num_prompt_tokens
        return answer[place] if place < len(answer) else self._rng.randrange(VOCAB_SIZE)
