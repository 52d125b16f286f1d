"""Fake speculative decoding: draft tokens of the fake model's output, some of them wrong, at random steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from llm_serving.core.request import Request
from llm_serving.core.window import NO_WINDOW
from llm_serving.speculation import NgramProposer, SpeculationController
from llm_serving.speculation.ngram import FinishedAnswersIndex, NgramLookup, RequestDrafts
from support.factories import create_request
from support.fake_runner import VOCAB_SIZE, next_token, seen

MAX_DRAFT_TOKENS = 7
FINISHED_TOKENS = 2**10
"""A small index, because it is not used, and a large slot table takes longer than a whole seed of `simulation.py`."""


class RandomDrafts(SpeculationController):
    """Drafts at random steps; a share `wrong` of the draft tokens is drawn at random."""

    vocab_size = VOCAB_SIZE

    def __init__(self, rng: random.Random, wrong: float = 0.2, window: int = NO_WINDOW) -> None:
        self._rng, self._wrong, self._window = rng, wrong, window
        super().__init__(MAX_DRAFT_TOKENS, NgramProposer(3, FinishedAnswersIndex(3, FINISHED_TOKENS)))
        anyone = create_request(1)
        self.waiting[anyone] = RequestDrafts(0.0, lookup=NgramLookup([], "", 3, self._ngram.finished))
        """Makes the engine request drafts at every step."""

    @property
    def pays(self) -> bool:
        return self._rng.random() < 0.8

    @pays.setter
    def pays(self, value: bool) -> None:
        pass

    def propose(self, num_running: int, *, synchronous: bool) -> list[tuple[Request, list[int]]]:
        del num_running, synchronous  # the scheduler drops drafts of requests with a token in flight
        drafts = [(request, self._draft_of(request)) for request in self._ngram.requests if request.is_decoding]
        return [each for each in drafts if self._rng.random() < 0.9]

    def _draft_of(self, request: Request) -> list[int]:
        """Draft some tokens, each from the tokens before it, also from wrong ones."""
        token_ids = request.prompt_token_ids + request.output_token_ids
        draft = []
        for _ in range(self._rng.randint(0, MAX_DRAFT_TOKENS)):
            token_id = self._next_of(request, token_ids)
            if self._rng.random() < self._wrong:
                token_id = self._rng.randrange(self.vocab_size)
            draft.append(token_id)
            token_ids.append(token_id)
        return draft

    def _next_of(self, request: Request, token_ids: list[int]) -> int:
        return next_token(seen(token_ids, self._window), request.sampling.seed % 2**63)


class KnownAnswerDrafts(RandomDrafts):
    """Drafts tokens of known answers, by request id."""

    def __init__(self, rng: random.Random, answers: Mapping[str, Sequence[int]], wrong: float = 0.2) -> None:
        super().__init__(rng, wrong)
        self._answers = answers

    def _next_of(self, request: Request, token_ids: list[int]) -> int:
        answer, position = self._answers[request.request_id], len(token_ids) - request.num_prompt_tokens
        return answer[position] if position < len(answer) else self._rng.randrange(self.vocab_size)
