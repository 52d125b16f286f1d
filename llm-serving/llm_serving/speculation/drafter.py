"""Who is guessed for, how far, and whether that pays.

What a request says is compared with what would have been looked up, checked or not, so how often guesses of it are
right is known before one of them costs anything. A comparison takes little; a look for a guess, where there is none or
it has turned out to be wrong, takes more: as long as guesses do not pay there are as many looks as take a small share
of the time of steps. A draft that is right brings a token; any draft costs what a token adds to a step, and as long as
drafts are worth waiting for replies no step is formed while the one before it is computed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from llm_serving.core.choices import Proposer
from llm_serving.core.clock import Clock
from llm_serving.core.request import FINISHED, RUNNING, Request
from llm_serving.speculation.draft_model import DraftModel
from llm_serving.speculation.finished_answers import FinishedAnswers
from llm_serving.speculation.lookup import Lookup
from llm_serving.speculation.step_cost import StepCost
from llm_serving.speculation.trust import HIT_MEMORY, LEAST_HITS, Trust

MOST_HITS: Final = 0.98
HIT_PARTS: Final = 64
MOST_DELAY: Final = 0.03
"""Of a step's time: what drafts may cost requests without any, shared among all that run."""
FINISHED_TOKENS: Final = 2**18
"""Tokens of finished answers that are looked in, of all tenants together."""
HOPELESS: Final = 0.25
"""Share of right guesses below which a request that has said something else waits for its turn to be looked at."""
LOOK_SHARE: Final = 0.0025
"""Of the time of steps, that looks may take which are not paid for."""
LOOK_S: Final = 2.5e-6
"""Seconds of a look, before one was measured."""
LOOK_MEMORY: Final = 64
"""Steps after which their measured time counts 1/e."""
SELDOM: Final = 2
"""Steps from one that is followed to the next, while guesses do not pay."""
TAKEN_TOGETHER: Final = 8
"""One in so many of those that run has to end before finished answers are taken, as many together cost little more than
one."""


class _State:
    __slots__ = ("forced_hits", "hits", "lookup", "num_proposed", "num_tokens", "proposer", "trust")

    def __init__(self, lookup: Lookup, trust: Trust | None) -> None:
        self.lookup = lookup
        self.trust = trust
        """In the draft model; None: there is none."""
        self.hits = 0.0
        """Share of right guesses of late."""
        self.forced_hits = 1.0
        """The same, of what a constraint forces; that is known only of what was checked."""
        self.num_tokens = 0
        """Tokens of the answer that the look-up has taken."""
        self.num_proposed = 0
        """Of the newest drafts; those behind them are forced."""
        self.proposer = Proposer.NGRAM
        """Whose these are."""

    def compare(self, output: list[int]) -> bool:
        """Compares the newest tokens with what was guessed, up to the first wrong one; returns whether there still is
        a guess."""
        lookup, hits, num_tokens = self.lookup, self.hits, len(output)
        for index in range(self.num_tokens, num_tokens):
            right = lookup.append(output[index])
            hits += (right - hits) / HIT_MEMORY
            if not right:
                lookup.extend(output[index + 1 :])
                break
        self.hits, self.num_tokens = hits, num_tokens
        return lookup.has_guess

    def look(self, output: list[int]) -> bool:
        """Looks for a guess behind the newest token; returns whether there is one."""
        if num_new := len(output) - self.num_tokens:
            self.lookup.extend(output[-num_new:])
            self.hits *= (1 - 1 / HIT_MEMORY) ** num_new
            self.num_tokens += num_new
        self.lookup.look()
        return self.lookup.has_guess


class Drafter:
    """Belongs to the thread of an engine; what it comes to, the scheduler is told."""

    def __init__(
        self,
        max_drafts: int,
        ngram_length: int,
        model: DraftModel | None = None,
        clock: Clock | None = None,
        *,
        finished_tokens: int = FINISHED_TOKENS,
    ) -> None:
        """
        Args:
            max_drafts: Most tokens that are guessed for a request at a time.
            ngram_length: Tokens by which what follows is looked up.
            model: Goes on with those for whom nothing right is found so.
            clock: By which the time of looks is measured; None: it is not.
            finished_tokens: Of the newest finished answers, which are looked up too; takes 32 bytes each at once.
        """
        self._clock = clock
        self._look_s = LOOK_S
        self._max_drafts = max_drafts
        self._model = model
        self._ngram_length = ngram_length
        self._finished = FinishedAnswers(ngram_length, finished_tokens)
        self._states: dict[Request, _State] = {}
        self._followed: dict[Request, _State] = {}
        """Those for whom there is a guess: each of their tokens is compared with it."""
        self._predictable: dict[Request, _State] = {}
        """Those of them whose guesses are mostly right."""
        self._lost: dict[Request, _State] = {}
        """Those without a guess of whom one may be right: the new ones, and those guessed rightly of late."""
        self._constrained: dict[Request, _State] = {}
        self._ended: list[tuple[str, tuple[int, ...]]] = []
        """Answers that have not been taken yet, with their namespaces."""
        self._to_visit: deque[Request] = deque()
        """All, the one next that has not been looked at for the longest time."""
        self._visits = 0.0
        """How many of them are to be looked at; the fraction is left for the next step."""
        self._turn_of_lost = True
        self._num_steps = 0
        """Replied to since the newest one that was followed."""
        self._cost = StepCost()
        self._worth: dict[tuple[int, int], tuple[int, float]] = {}
        """By rows of a step and share of right guesses (in `HIT_PARTS`): how far to guess, and what it brings."""
        self.pays = False
        """Whether drafts are worth what they cost, waiting for replies included."""
        self._host_s = 0.0

    def begin(self, request: Request) -> None:
        """Guesses for a request from now on, unless it is answered in another way than token by token."""
        if request.form is None and request.sampling.max_tokens > 1:
            if not self._states:
                self._take_ended()
            lookup = Lookup(request.prompt_token_ids, request.cache_namespace, self._ngram_length, self._finished)
            trust = None if self._model is None else self._model.begin()
            state = self._states[request] = _State(lookup, trust)
            if request.walk is not None:
                self._constrained[request] = state
            self._lost[request] = state
            self._to_visit.append(request)

    def drafts(self, num_running: int, *, waits: bool) -> list[tuple[Request, list[int]]]:
        """What to guess in the next step.

        Args:
            num_running: Requests that run.
            waits: Whether no step is on its way; otherwise, and where drafts do not pay, only those get some who wait
                for replies anyway.

        Raises:
            WorkerError: The WorkAgent whose draft model was asked is gone.
        """
        asked = self._asked() if waits and self.pays else {}
        if not self._predictable and not self._constrained and not asked:
            return []
        proposed = self._proposed(asked, num_running)
        found = []
        for request, state in {**self._constrained, **self._predictable, **asked}.items():
            if _is_ready(request) and ((waits and self.pays) or request.waits_for_reply):
                token_ids = self._guess(request, state, num_running, proposed.get(request, []))
                if token_ids:
                    found.append((request, token_ids))
        return found

    def checked(self, request: Request, num_drafts: int, num_right: int) -> list[tuple[Proposer, int, int]]:
        """So many drafts of a request were checked, of which the first so many were right; returns whose they were."""
        state = self._states.get(request)
        num_proposed = num_drafts if state is None else min(num_drafts, state.num_proposed)
        num_forced, right = num_drafts - num_proposed, min(num_right, num_proposed)
        if state is not None and num_forced and right == num_proposed:
            for index in range(min(num_right - right + 1, num_forced)):
                state.forced_hits += ((index < num_right - right) - state.forced_hits) / HIT_MEMORY
        proposer = Proposer.NGRAM if state is None else state.proposer
        if self._model is not None and state is not None and state.trust and proposer is Proposer.DRAFT_MODEL:
            self._model.checked(state.trust, request, num_proposed, right)
        counts = ((proposer, num_proposed, right), (Proposer.FORCED, num_forced, num_right - right))
        return [each for each in counts if each[1]]

    def replied(self, ended: Iterable[Request], num_rows: int) -> None:
        """Requests have got tokens by a step of so many rows, some of them their last ones."""
        for request in ended:
            self._end(request)
        if len(self._ended) * TAKEN_TOGETHER >= num_rows:
            self._take_ended()
        self._num_steps += 1
        if self.pays or self._num_steps >= SELDOM:
            self._compare()
            self._visit(num_rows, self._num_steps)
            self._num_steps = 0
            asked = self._asked()
            self.pays = bool(self._predictable or asked) and self._pays(num_rows, asked)

    def measured(self, num_tokens: int, seconds: float, host_s: float) -> None:
        """A step without prompts took so long; to wait for its reply costs `host_s`, where one is formed ahead."""
        self._cost.note(num_tokens, seconds)
        self._worth.clear()
        self._host_s = host_s

    def _asked(self) -> dict[Request, _State]:
        """Those for whom the draft model is to be asked; nobody while a prompt waits or is computed."""
        if self._model is None:
            return {}
        candidates = []
        for request, state in self._states.items():
            if request.status is FINISHED:
                continue
            if request.status is not RUNNING or not request.is_decoding:
                return {}
            if request not in self._predictable and state.trust and state.trust.lasts(len(request.output_token_ids)):
                candidates.append(request)
        return {request: self._states[request] for request in self._model.takes(candidates)}

    def _proposed(self, asked: Mapping[Request, _State], num_running: int) -> dict[Request, list[int]]:
        if self._model is None or not asked:
            return {}
        proposed = self._model.propose(
            [
                (request, self._reach(state.trust.hits, num_running, self._model.pass_s / len(asked)))
                for request, state in asked.items()
                if state.trust is not None and _is_ready(request)
            ]
        )
        for request, token_ids in proposed.items():
            if not token_ids:
                self._proposed_in_vain(request, asked[request])
        return proposed

    def _proposed_in_vain(self, request: Request, state: _State) -> None:
        """Nothing that can be checked came of it, which counts as wrong: else it would be asked at every step."""
        assert self._model is not None and state.trust is not None
        self._model.checked(state.trust, request, 1, 0)

    def _guess(self, request: Request, state: _State, num_running: int, proposed: list[int]) -> list[int]:
        guesses, state.proposer = proposed, Proposer.DRAFT_MODEL
        if request in self._predictable:
            guesses, state.proposer = state.lookup.guess(self._looked_up(state.hits, num_running)[0]), Proposer.NGRAM
        state.num_proposed = len(guesses)
        if request.walk is None:
            return guesses
        reach = self._reach(state.forced_hits, num_running) if state.forced_hits >= LEAST_HITS else 0
        if not guesses and not reach:
            return []
        possible = request.walk.possible(request.output_token_ids, guesses, max(len(guesses), reach))
        while possible[: state.num_proposed] != guesses[: state.num_proposed]:
            state.num_proposed -= 1
        if proposed and not state.num_proposed and state.proposer is Proposer.DRAFT_MODEL:
            self._proposed_in_vain(request, state)
        return possible

    def _reach(self, hits: float, num_rows: int, proposing_s: float = 0.0) -> int:
        """How far to guess: the last draft brings as much as it costs, `proposing_s` to make it included."""
        hits = min(hits, MOST_HITS)
        step_s = self._cost.seconds_of(num_rows)
        worth = num_rows * (self._cost.seconds_a_token + proposing_s) / step_s if step_s else 0.0
        if worth >= hits:
            return 0
        return min(self._max_drafts, int(math.log(max(worth, 1e-3)) / math.log(hits)))

    def _looked_up(self, hits: float, num_rows: int) -> tuple[int, float]:
        """How far to guess what is looked up, and the tokens that this brings."""
        key = num_rows, int(HIT_PARTS * hits)
        if (known := self._worth.get(key)) is None:
            hits = key[1] / HIT_PARTS
            reach = self._reach(hits, num_rows)
            known = self._worth[key] = reach, _expected(hits, reach)
        return known

    def _pays(self, num_rows: int, asked: Mapping[Request, _State]) -> bool:
        """Whether more tokens come in the same time, with all drafts that are worth their own cost, and hardly fewer
        for those who get none."""
        step_s = self._cost.seconds_of(num_rows)
        if not step_s or not num_rows:
            return True
        num_drafts, gain = 0, 0.0
        for state in self._predictable.values():
            reach, brought = self._looked_up(state.hits, num_rows)
            gain += brought
            num_drafts += reach
        cost = self._host_s
        if self._model is not None and asked:
            share_s, farthest = self._model.pass_s / len(asked), 0
            for state in asked.values():
                assert state.trust is not None
                reach = self._reach(state.trust.hits, num_rows, share_s)
                gain += _expected(state.trust.hits, reach)
                num_drafts += reach
                farthest = max(farthest, reach)
            cost += farthest * self._model.pass_s
        cost += num_drafts * self._cost.seconds_a_token
        num_without = num_rows - len(self._predictable) - len(asked)
        return gain / num_rows > cost / step_s and num_without * cost <= MOST_DELAY * num_rows * step_s

    def _compare(self) -> None:
        """Compares what those who are followed have said with what was guessed."""
        wrong = []
        for request, state in self._followed.items():
            if not state.compare(request.output_token_ids):
                wrong.append((request, state))
            elif state.hits >= LEAST_HITS:
                self._predictable[request] = state
        if not wrong:
            return
        pays = self.pays
        for request, state in wrong:
            del self._followed[request]
            self._predictable.pop(request, None)
            if state.hits >= HOPELESS:
                self._lost[request] = state
                if pays:
                    self._look(request, state)

    def _look(self, request: Request, state: _State) -> None:
        self._lost.pop(request, None)
        if state.look(request.output_token_ids):
            self._followed[request] = state
            if state.hits >= LEAST_HITS:
                self._predictable[request] = state

    def _visit(self, num_rows: int, num_steps: int) -> None:
        """Looks at some who are not followed, those of whom a guess may be right and all others in turns.

        As many as `num_steps` steps have time for.
        """
        step_s = self._cost.seconds_of(num_rows)
        most = float(len(self._to_visit))
        num_new = num_steps * LOOK_SHARE * step_s / self._look_s
        self._visits = min(most, self._visits + num_new) if step_s else most
        num_visits = int(self._visits)
        self._visits -= num_visits
        if self._clock is None or not num_visits:
            self._look_at(num_visits)
            return
        began = self._clock()
        self._look_at(num_visits)
        seconds = (self._clock() - began) / num_visits
        # A thread that is put off in the middle says little of a look.
        self._look_s += (min(seconds, 4 * self._look_s) - self._look_s) / LOOK_MEMORY

    def _look_at(self, num_visits: int) -> None:
        for _ in range(num_visits):
            if self._lost and self._turn_of_lost:
                self._turn_of_lost = False
                request = next(reversed(self._lost))
            else:
                self._turn_of_lost = True
                request = self._to_visit.popleft()
                if request not in self._states:
                    continue
                self._to_visit.append(request)
            state = self._states[request]
            if request.status is FINISHED:  # without a reply
                self._forget(request)
            elif request not in self._followed:
                self._look(request, state)

    def _end(self, request: Request) -> None:
        if request in self._states:
            self._forget(request)
            self._ended.append((request.cache_namespace, tuple(request.output_token_ids)))

    def _take_ended(self) -> None:
        ended, self._ended = self._ended, []
        self._finished.add(ended)

    def _forget(self, request: Request) -> None:
        del self._states[request]
        for states in (self._followed, self._predictable, self._lost, self._constrained):
            states.pop(request, None)


def _expected(hits: float, reach: int) -> float:
    """Right guesses of so many, each of which is right with the probability `hits` if the one before it is."""
    hits = min(hits, MOST_HITS)
    return hits * (1 - hits**reach) / (1 - hits)


def _is_ready(request: Request) -> bool:
    """Whether its next step computes its newest token alone, which is known."""
    return request.status is RUNNING and not request.num_tokens_in_flight and request.is_decoding
