"""Who is guessed for, how far, and whether that pays.

What a request says is compared with what would have been looked up, checked or not, so how often guesses of it are
right is known before one of them costs anything. Where they are mostly wrong it is looked at now and then, as often as
takes a small share of the time of steps: whether there is a guess, and as long as that is right. A draft that is right
brings a token; any draft costs what a token adds to a step, and as long as drafts are worth waiting for replies no step
is formed while the one before it is computed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from llm_serving.core.choices import Proposer
from llm_serving.core.request import FINISHED, RUNNING, Request
from llm_serving.speculation.finished_answers import FinishedAnswers
from llm_serving.speculation.lookup import Lookup
from llm_serving.speculation.step_cost import StepCost

HIT_MEMORY: Final = 8
"""Tokens after which a right or wrong guess counts 1/e."""
LEAST_HITS: Final = 0.5
"""Share of right guesses below which a request gets no drafts."""
MOST_HITS: Final = 0.98
MOST_DELAY: Final = 0.03
"""Of a step's time: what drafts may cost requests without any, shared among all that run."""
FINISHED_TOKENS: Final = 2**18
"""Tokens of finished answers that are looked in, of all tenants together."""
HOPELESS: Final = 0.25
"""Share of right guesses below which a request that has said something else is looked at now and then only."""
LOOKS_A_SECOND: Final = 1000
"""Of such requests, so many are looked at in a second of steps; one takes 2 to 4 us."""
FEW: Final = 2
"""Tokens that are compared one by one when one of them is looked at; of more, the index takes note only."""


class _State:
    __slots__ = ("forced_hits", "hits", "lookup", "num_looked_up", "num_tokens")

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self.hits = 0.0
        """Share of right guesses of late."""
        self.forced_hits = 1.0
        """The same, of what a constraint forces; that is known only of what was checked."""
        self.num_tokens = 0
        """Tokens of the answer that the look-up has taken."""
        self.num_looked_up = 0
        """Of the newest drafts; those behind them are forced."""


class Drafter:
    """Belongs to the thread of an engine; what it comes to, the scheduler is told."""

    def __init__(self, max_drafts: int, ngram_length: int) -> None:
        """At most `max_drafts` tokens are guessed for a request at a time, by its last `ngram_length` tokens."""
        self._max_drafts = max_drafts
        self._ngram_length = ngram_length
        self._finished = FinishedAnswers(ngram_length, FINISHED_TOKENS)
        self._states: dict[Request, _State] = {}
        self._followed: dict[Request, _State] = {}
        """Those of whom something is, rightly of late: each of their tokens is compared with it."""
        self._predictable: dict[Request, _State] = {}
        """Those of them whose guesses are mostly right."""
        self._constrained: dict[Request, _State] = {}
        self._to_visit: deque[Request] = deque()
        """All, the one next that has not been looked at for the longest time."""
        self._visits = 0.0
        """How many of them are to be looked at; the fraction is left for the next step."""
        self._cost = StepCost()
        self.pays = False
        """Whether drafts are worth what they cost, waiting for replies included."""
        self._host_s = 0.0

    def begin(self, request: Request) -> None:
        """Guesses for a request from now on, unless it is answered in another way than token by token."""
        if request.form is None and request.sampling.max_tokens > 1:
            lookup = Lookup(request.prompt_token_ids, request.cache_namespace, self._ngram_length, self._finished)
            state = self._states[request] = _State(lookup)
            if request.walk is not None:
                self._constrained[request] = state
            if lookup.has_guess:
                self._followed[request] = state
            self._to_visit.append(request)

    def drafts(self, num_running: int, *, waits: bool) -> list[tuple[Request, list[int]]]:
        """What to guess in the next step.

        Args:
            num_running: Requests that run.
            waits: Whether no step is on its way; otherwise, and where drafts do not pay, only those get some who wait
                for replies anyway.
        """
        if not self._predictable and not self._constrained:
            return []
        found = []
        for request, state in {**self._constrained, **self._predictable}.items():
            if request.status is not RUNNING or request.num_tokens_in_flight or not request.is_decoding:
                continue
            if (waits and self.pays) or request.waits_for_reply:
                token_ids = self._guess(request, state, num_running)
                if token_ids:
                    found.append((request, token_ids))
        return found

    def checked(self, request: Request, num_drafts: int, num_right: int) -> list[tuple[Proposer, int, int]]:
        """So many drafts of a request were checked, of which the first so many were right; returns whose they were."""
        state = self._states.get(request)
        num_looked_up = num_drafts if state is None else min(num_drafts, state.num_looked_up)
        num_forced, right = num_drafts - num_looked_up, min(num_right, num_looked_up)
        if state is not None and num_forced and right == num_looked_up:
            for index in range(min(num_right - right + 1, num_forced)):
                state.forced_hits += ((index < num_right - right) - state.forced_hits) / HIT_MEMORY
        counts = ((Proposer.NGRAM, num_looked_up, right), (Proposer.FORCED, num_forced, num_right - right))
        return [each for each in counts if each[1]]

    def replied(self, updated: Iterable[Request], num_rows: int) -> None:
        """Requests have got tokens by a step of so many rows."""
        followed, ended = self._followed, []
        for request in updated:
            if request.status is FINISHED:
                ended.append(request)
            elif (state := followed.get(request)) is not None:
                self._follow(request, state)
        self._end(ended)
        self._visit(num_rows)
        self.pays = bool(self._predictable) and self._pays(num_rows)

    def measured(self, num_tokens: int, seconds: float, host_s: float) -> None:
        """A step without prompts took so long; to wait for its reply costs `host_s`, where one is formed ahead."""
        self._cost.note(num_tokens, seconds)
        self._host_s = host_s

    def _guess(self, request: Request, state: _State, num_running: int) -> list[int]:
        guesses = []
        if request in self._predictable:
            guesses = state.lookup.guess(self._reach(state.hits, num_running))
        state.num_looked_up = len(guesses)
        if request.walk is None:
            return guesses
        reach = self._reach(state.forced_hits, num_running) if state.forced_hits >= LEAST_HITS else 0
        if not guesses and not reach:
            return []
        possible = request.walk.possible(request.output_token_ids, guesses, max(len(guesses), reach))
        while possible[: state.num_looked_up] != guesses[: state.num_looked_up]:
            state.num_looked_up -= 1
        return possible

    def _reach(self, hits: float, num_rows: int) -> int:
        """How far to guess: the last draft brings as much as it costs."""
        hits = min(hits, MOST_HITS)
        step_s = self._cost.seconds_of(num_rows)
        worth = num_rows * self._cost.seconds_a_token / step_s if step_s else 0.0
        if worth >= hits:
            return 0
        return min(self._max_drafts, int(math.log(max(worth, 1e-3)) / math.log(hits)))

    def _pays(self, num_rows: int) -> bool:
        """Whether more tokens come in the same time, with all drafts that are worth their own cost, and hardly fewer
        for those who get none."""
        step_s = self._cost.seconds_of(num_rows)
        if not step_s or not num_rows:
            return True
        gain, cost = 0.0, self._host_s
        for state in self._predictable.values():
            hits, reach = min(state.hits, MOST_HITS), self._reach(state.hits, num_rows)
            gain += hits * (1 - hits**reach) / (1 - hits)
            cost += reach * self._cost.seconds_a_token
        num_without = num_rows - len(self._predictable)
        return gain / num_rows > cost / step_s and num_without * cost <= MOST_DELAY * num_rows * step_s

    def _follow(self, request: Request, state: _State) -> None:
        """Compares the newest tokens with what was guessed."""
        output = request.output_token_ids
        hits, append, right = state.hits, state.lookup.append, True
        for index in range(state.num_tokens, len(output)):
            right = append(output[index])
            hits += (right - hits) / HIT_MEMORY
        state.hits, state.num_tokens = hits, len(output)
        has_guess = state.lookup.has_guess
        if hits >= LEAST_HITS and has_guess:
            self._predictable[request] = state
        else:
            self._predictable.pop(request, None)
        if hits >= HOPELESS or (right and has_guess):
            self._followed[request] = state
        else:
            self._followed.pop(request, None)

    def _visit(self, num_rows: int) -> None:
        """Looks at some who are not followed, and forgets who ended unnoticed."""
        step_s = self._cost.seconds_of(num_rows)
        most = float(len(self._to_visit))
        self._visits = min(most, self._visits + LOOKS_A_SECOND * step_s) if step_s else most
        num_visits = int(self._visits)
        self._visits -= num_visits
        for _ in range(num_visits):
            request = self._to_visit.popleft()
            state = self._states.get(request)
            if state is None:
                continue
            if request.status is FINISHED:  # without a reply
                self._forget(request)
                continue
            self._to_visit.append(request)
            num_new = len(request.output_token_ids) - state.num_tokens
            if num_new and request not in self._followed:
                self._look(request, state, num_new)

    def _look(self, request: Request, state: _State, num_new: int) -> None:
        if num_new > FEW:
            state.lookup.extend(request.output_token_ids[state.num_tokens :])
            state.hits *= (1 - 1 / HIT_MEMORY) ** num_new
            state.num_tokens += num_new
        self._follow(request, state)

    def _end(self, requests: Iterable[Request]) -> None:
        known = [request for request in requests if request in self._states]
        for request in known:
            self._forget(request)
        self._finished.add([(request.cache_namespace, tuple(request.output_token_ids)) for request in known])

    def _forget(self, request: Request) -> None:
        del self._states[request]
        for states in (self._followed, self._predictable, self._constrained):
            states.pop(request, None)
