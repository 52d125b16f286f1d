"""Who is guessed for, how far, and whether that pays.

A guess is looked up for each token of each request, checked or not, so how often guesses of a request are right is
known before one of them costs anything. A draft that is right brings a token; any draft costs what a token adds to a
step, and as long as there are drafts no step is formed while the one before it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from llm_serving.core.request import Request
from llm_serving.speculation.lookup import FinishedAnswers, Lookup
from llm_serving.speculation.step_cost import StepCost

HIT_MEMORY: Final = 8
"""Tokens after which a right or wrong guess counts 1/e."""
LEAST_HITS: Final = 0.5
"""Share of right guesses below which a request gets no drafts."""
MOST_HITS: Final = 0.98
FINISHED_TOKENS: Final = 2**18
"""Tokens of finished answers that are looked in, of all tenants together."""
PURGE_EVERY: Final = 256


class _State:
    __slots__ = ("hits", "lookup", "num_tokens")

    def __init__(self, lookup: Lookup, num_tokens: int) -> None:
        self.lookup = lookup
        self.hits = 0.0
        """Share of right guesses of late."""
        self.num_tokens = num_tokens
        """Tokens of the answer that the look-up has taken."""


class Drafter:
    """Belongs to the thread of an engine; what it comes to, the scheduler is told."""

    def __init__(self, max_drafts: int, ngram_length: int) -> None:
        """At most `max_drafts` tokens are guessed for a request at a time, by its last `ngram_length` tokens."""
        self._max_drafts = max_drafts
        self._ngram_length = ngram_length
        self._finished = FinishedAnswers(ngram_length, FINISHED_TOKENS)
        self._states: dict[Request, _State] = {}
        self._predictable: dict[Request, _State] = {}
        self._cost = StepCost()
        self._purge_in = PURGE_EVERY
        self.pays = False
        """Whether drafts are worth waiting for replies."""
        self._host_s = 0.0

    def begin(self, request: Request) -> None:
        """Guesses for a request from now on, unless what it may choose is known only with its output."""
        if request.form is None and not request.waits_for_reply and request.sampling.max_tokens > 1:
            lookup = Lookup(request.prompt_token_ids, request.cache_namespace, self._ngram_length, self._finished)
            self._states[request] = _State(lookup, 0)

    def drafts(self, running: Iterable[Request]) -> list[tuple[Request, list[int]]]:
        """What to guess for these requests, of whom nothing is on its way."""
        if not self.pays:
            return []
        count = 0
        wanted = []
        for request in running:
            count += 1
            state = self._predictable.get(request)
            if state is not None and request.is_decoding and not request.num_tokens_in_flight:
                wanted.append((request, state))
        found = [(request, state.lookup.guess(self._reach(state.hits, count))) for request, state in wanted]
        return [(request, token_ids) for request, token_ids in found if token_ids]

    def replied(self, updated: Iterable[Request], num_rows: int) -> None:
        """Requests have got tokens by a step of so many rows."""
        states, predictable = self._states, self._predictable
        for request in updated:
            state = states.get(request)
            if state is None:
                continue
            output = request.output_token_ids
            hits, append = state.hits, state.lookup.append
            for index in range(state.num_tokens, len(output)):
                hits += (append(output[index]) - hits) / HIT_MEMORY
            state.hits, state.num_tokens = hits, len(output)
            if request.is_finished:
                self._end(request)
            elif hits >= LEAST_HITS and state.lookup.has_guess:
                predictable[request] = state
            elif request in predictable:
                del predictable[request]
        self._purge_in -= 1
        if self._purge_in <= 0:
            self._purge()
        self.pays = bool(self._predictable) and self._pays(num_rows)

    def measured(self, num_tokens: int, seconds: float, host_s: float) -> None:
        """A step without prompts took so long; the master was at work for `host_s` between it and the next one."""
        self._cost.note(num_tokens, seconds)
        self._host_s = host_s

    def _reach(self, hits: float, num_rows: int) -> int:
        """How far to guess: the last draft brings as much as it costs."""
        hits = min(hits, MOST_HITS)
        step_s = self._cost.seconds_of(num_rows)
        worth = num_rows * self._cost.seconds_a_token / step_s if step_s else 0.0
        if worth >= hits:
            return 0
        return min(self._max_drafts, int(math.log(max(worth, 1e-3)) / math.log(hits)))

    def _pays(self, num_rows: int) -> bool:
        """Whether more tokens come in the same time, with all drafts that are worth their own cost."""
        step_s = self._cost.seconds_of(num_rows)
        if not step_s or not num_rows:
            return True
        gain = cost = 0.0
        for state in self._predictable.values():
            hits, reach = min(state.hits, MOST_HITS), self._reach(state.hits, num_rows)
            gain += hits * (1 - hits**reach) / (1 - hits)
            cost += reach * self._cost.seconds_a_token
        return gain / num_rows > (cost + self._host_s) / step_s

    def _end(self, request: Request) -> None:
        del self._states[request]
        self._predictable.pop(request, None)
        self._finished.add(request.cache_namespace, tuple(request.output_token_ids))

    def _purge(self) -> None:
        """Forgets requests that ended without a reply."""
        self._purge_in = PURGE_EVERY
        for request in [each for each in self._states if each.is_finished]:
            del self._states[request]
            self._predictable.pop(request, None)
