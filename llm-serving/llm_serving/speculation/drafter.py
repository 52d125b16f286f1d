"""Who is guessed for, how far, and whether that pays.

What a request says is compared with what would have been looked up, checked or not, so how often guesses of it are
right is known before one of them costs anything. A comparison takes little; a look for a guess, where there is none or
it has turned out to be wrong, takes more: as long as guesses do not pay there are as many looks as take a small share
of the time of steps. A draft that is right brings a token; any draft costs what a token adds to a step, and as long as
drafts are worth waiting for replies no step is formed while the one before it is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from llm_serving.core.enums import Proposer
from llm_serving.core.request import FINISHED, RUNNING, Request
from llm_serving.core.step import MAX_CONTINUATIONS
from llm_serving.core.timings import Clock
from llm_serving.speculation.draft_model import DraftModel
from llm_serving.speculation.finished_answers import FinishedAnswers
from llm_serving.speculation.guess_state import GuessState
from llm_serving.speculation.lookup import Lookup
from llm_serving.speculation.pace import Pace
from llm_serving.speculation.payoff import Forced, Guesses, Payoff
from llm_serving.speculation.smoothing import smoothed
from llm_serving.speculation.trust import HIT_MEMORY, LEAST_HITS
from llm_serving.speculation.worth import Worth, alike

FINISHED_TOKENS: Final = 2**18
"""Tokens of finished answers that are looked in, of all tenants together."""
LEAST_CHANCE: Final = 0.25
"""That what was looked up is right, below which it is not guessed; with a draft model `LEAST_HITS`, as that may know
better."""
HOPELESS: Final = 0.25
"""Share of right guesses below which a request that has said something else waits for its turn to be looked at."""
LOOK_SHARE: Final = 0.0025
"""Of the time of steps, that looks may take which are not paid for."""
LOOK_S: Final = 2.5e-6
"""Seconds of a look, before one was measured."""
LOOK_MEMORY: Final = 16
"""Followed steps after which their measured time counts 1/e."""
FAILED: Final = -1
"""In place of a token that a step could not choose; in the next step that would stand for another row's token."""
MANY: Final = 32
"""To ask that takes as long as to compare so many."""
LEAST_SWEPT: Final = 64
TAKEN_TOGETHER: Final = 8
"""One in so many of those that run has to end before finished answers are taken, as many together cost little more than
one."""
TAKEN_SELDOM: Final = 2
"""The same, while guesses do not pay."""


class Drafter:
    """Belongs to the thread of an engine; what it comes to, the scheduler is told."""

    def __init__(
        self,
        max_drafts: int,
        ngram_length: int,
        model: DraftModel | None = None,
        clock: Clock | None = None,
        *,
        finished: FinishedAnswers | None = None,
    ) -> None:
        """
        Args:
            max_drafts: Most tokens that are guessed for a request at a time.
            ngram_length: Tokens by which what follows is looked up.
            model: Goes on with those for whom nothing right is found so.
            clock: By which the time of looks is measured; None: it is not.
            finished: The newest finished answers, which are looked up too; None: `FINISHED_TOKENS` of them, which
                takes 64 bytes for each at once.
        """
        self._clock = clock
        self._look_s = LOOK_S
        self._model = model
        self._ngram_length = ngram_length
        self._finished = FinishedAnswers(ngram_length, FINISHED_TOKENS) if finished is None else finished
        self._states: OrderedDict[Request, GuessState] = OrderedDict()
        """The first is the one that has not been looked at for the longest time."""
        self._swept_at = LEAST_SWEPT
        """Of so many, those are forgotten that ended without a reply."""
        self._followed: dict[Request, GuessState] = {}
        """Those for whom there is a guess: each of their tokens is compared with it."""
        self._predictable: dict[Request, GuessState] = {}
        """Those of them whose guesses are mostly right."""
        self._lost: dict[Request, GuessState] = {}
        """Those without a guess of whom one may be right: the new ones, and those guessed rightly of late."""
        self._constrained: dict[Request, GuessState] = {}
        self._waiting: dict[Request, GuessState] = {}
        """Those who wait for replies anyway."""
        self._ended: list[tuple[str, tuple[int, ...]]] = []
        """Answers that have not been taken yet, with their namespaces."""
        self._visits = 0.0
        """How many of them are to be looked at; the fraction is left for the next step."""
        self._turn_of_lost = True
        self._pace = Pace()
        self._payoff = Payoff(max_drafts)
        self._least_chance = LEAST_CHANCE if model is None else LEAST_HITS
        self.pays = False
        """Whether drafts are worth what they cost, waiting for replies included."""

    def begin(self, request: Request) -> None:
        """Guesses for a request from now on, unless it is answered in another way than token by token."""
        if request.form is None and request.sampling.max_tokens > 1:
            if not self._states:
                self._take_ended()
            lookup = Lookup(request.prompt_token_ids, request.cache_namespace, self._ngram_length, self._finished)
            trust = None if self._model is None else self._model.begin()
            state = self._states[request] = GuessState(lookup, trust)
            if request.walk is not None:
                self._constrained[request] = state
            if request.waits_for_reply:
                self._waiting[request] = state
            self._lost[request] = state
            self._pace.every_step()
            if len(self._states) >= self._swept_at:
                self._sweep()

    def drafts(self, num_running: int, *, waits: bool) -> list[tuple[Request, list[int]]]:
        """What to guess in the next step.

        Args:
            num_running: Requests that run.
            waits: Whether no step is on its way; otherwise, and where drafts do not pay, only those get some who wait
                for replies anyway.

        Raises:
            WorkerError: The WorkAgent whose draft model was asked is gone.
        """
        pays = waits and self.pays
        asked = self._asked() if pays else {}
        if pays:
            guessed = {**self._constrained, **self._predictable, **asked}
        else:
            guessed = {
                request: state
                for request, state in self._waiting.items()
                if request in self._constrained or request in self._predictable
            }
        if not guessed:
            return []
        proposed = self._proposed(asked, num_running)
        began = self._now()
        found = []
        for request, state in guessed.items():
            if _is_ready(request):
                token_ids = self._guess(request, state, num_running, proposed.get(request, []))
                if token_ids:
                    found.append((request, token_ids))
        if self._clock is not None and pays and found:
            self._payoff.guessed((self._now() - began) / len(found))
        return found

    def checked(self, request: Request, num_drafts: int, num_right: int) -> list[tuple[Proposer, int, int]]:
        """So many drafts of a request were checked, of which the first so many were right; returns whose they were."""
        state = self._states.get(request)
        num_proposed = num_drafts if state is None else min(num_drafts, state.num_proposed)
        num_forced, right = num_drafts - num_proposed, min(num_right, num_proposed)
        if state is not None and num_forced and right == num_proposed:
            state.note_forced(num_right - right, len(request.output_token_ids))
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
        if len(self._ended) * (TAKEN_TOGETHER if self.pays else TAKEN_SELDOM) >= num_rows:
            self._take_ended()
        if num_steps := self._pace.step():
            self._follow(num_rows, num_steps)

    def measured(self, num_tokens: int, seconds: float, host_s: float) -> None:
        """A step without prompts took so long; to wait for its reply costs `host_s`, where one is formed ahead."""
        self._payoff.measured(num_tokens, seconds, host_s)

    def _follow(self, num_rows: int, num_steps: int) -> None:
        """Finds out what has been guessed rightly in the newest steps, so many, and whether guesses pay."""
        if len(self._followed) >= MANY and not self._payoff.could_pay(num_rows):
            self.pays = False
            self._pace.hopeless()
            return
        began = self._now()
        self._compare()
        has_hope = self._look_for_hopeful(num_rows)
        self._visit(num_steps)
        asked = self._asked()
        self.pays = bool(self._predictable or self._constrained or asked) and self._pays(num_rows, asked)
        if self.pays or has_hope:
            self._pace.every_step()
        else:
            self._pace.in_vain(self._now() - began, self._payoff.step_s)

    def _now(self) -> float:
        return 0.0 if self._clock is None else self._clock()

    def _asked(self) -> dict[Request, GuessState]:
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

    def _proposed(self, asked: Mapping[Request, GuessState], num_running: int) -> dict[Request, list[int]]:
        if self._model is None or not asked:
            return {}
        worth, share_s = self._worth_of(num_running), self._model.pass_s / len(asked)
        proposed = self._model.propose(
            [
                (request, worth.reach(alike(state.trust.hits), share_s))
                for request, state in asked.items()
                if state.trust is not None and _is_ready(request)
            ]
        )
        for request, token_ids in proposed.items():
            if not token_ids:
                self._proposed_in_vain(request, asked[request])
        return proposed

    def _proposed_in_vain(self, request: Request, state: GuessState) -> None:
        """Nothing that can be checked came of it, which counts as wrong: else it would be asked at every step."""
        assert self._model is not None and state.trust is not None
        self._model.checked(state.trust, request, 1, 0)

    def _guess(self, request: Request, state: GuessState, num_running: int, proposed: list[int]) -> list[int]:
        worth = self._worth_of(num_running)
        guesses, state.proposer = proposed, Proposer.DRAFT_MODEL
        if request in self._predictable and state.compare(request.output_token_ids):
            guesses, state.proposer = state.lookup.guess(worth.looked_up(state.chance)[0]), Proposer.NGRAM
        state.num_proposed = len(guesses)
        if request.walk is None:
            return guesses
        reach = worth.reach(alike(state.forced_hits)) if state.forced_hits >= LEAST_HITS else 0
        if not guesses and not reach:
            return []
        output = request.output_token_ids
        possible = request.walk.possible(output, guesses, max(len(guesses), reach))
        if not guesses and not possible:
            state.note_forced(0, len(output))
        while possible[: state.num_proposed] != guesses[: state.num_proposed]:
            state.num_proposed -= 1
        if proposed and not state.num_proposed and state.proposer is Proposer.DRAFT_MODEL:
            self._proposed_in_vain(request, state)
        return possible

    def _worth_of(self, num_rows: int) -> Worth:
        return self._payoff.worth_of(num_rows, self._num_guessed)

    @property
    def _num_guessed(self) -> int:
        """Requests for which something may be guessed, at most."""
        num_guessed = len(self._predictable) + len(self._constrained)
        return num_guessed if self._model is None else num_guessed + MAX_CONTINUATIONS

    def _pays(self, num_rows: int, asked: Mapping[Request, GuessState]) -> bool:
        """Whether drafts are worth waiting for replies; `asked`: for whom the draft model is to be asked."""
        guesses = Guesses(
            self._forced(asked),
            [state.chance for state in self._predictable.values()],
            [state.trust.hits for state in asked.values() if state.trust is not None],
            sum(each.hits >= LEAST_HITS and request.status is RUNNING for request, each in self._lost.items()),
        )
        pass_s = 0.0 if self._model is None else self._model.pass_s
        return self._payoff.pays(num_rows, self._num_guessed, guesses, pass_s)

    def _forced(self, asked: Collection[Request]) -> list[Forced]:
        """Of those for whom nothing but what a constraint forces is known."""
        return [
            Forced(state.forced_hits, state.forced(len(request.output_token_ids)))
            for request, state in self._constrained.items()
            if request.status is RUNNING
            and request not in self._predictable
            and request not in asked
            and state.forced_hits >= LEAST_HITS
        ]

    def _compare(self) -> None:
        """Compares what those who are followed have said with what was guessed."""
        wrong, gone = [], []
        for request, state in self._followed.items():
            if request.status is FINISHED:  # without a reply
                gone.append(request)
            elif not state.compare(request.output_token_ids):
                wrong.append((request, state))
            elif state.chance.first >= self._least_chance:
                self._predictable[request] = state
            else:
                self._predictable.pop(request, None)
        for request in gone:
            self._forget(request)
        pays = self.pays
        for request, state in wrong:
            del self._followed[request]
            self._predictable.pop(request, None)
            if max(state.hits, state.chance.first) >= HOPELESS:
                self._lost[request] = state
                if pays:
                    self._look(request, state)

    def _look(self, request: Request, state: GuessState) -> None:
        self._lost.pop(request, None)
        if state.look(request.output_token_ids):
            self._followed[request] = state
            if state.chance.first >= self._least_chance:
                self._predictable[request] = state
        elif state.hope(len(request.output_token_ids)) >= HOPELESS:
            self._lost[request] = state

    def _look_for_hopeful(self, num_rows: int) -> bool:
        """Looks for guesses of those without one of whom a look may bring more than it takes, as steps last long or
        few run; returns whether there were any."""
        step_s = self._payoff.step_s
        if not self._lost or num_rows * self._look_s >= step_s:
            return False
        least = num_rows * self._look_s / step_s
        hopeful, hopeless = [], []
        for request, state in self._lost.items():
            hope = state.hope(len(request.output_token_ids))
            if hope > least and request.status is RUNNING:
                hopeful.append((request, state))
            elif hope < HOPELESS and state.num_tokens:
                hopeless.append(request)
        for request in hopeless:
            del self._lost[request]
        if not hopeful or not self._payoff.could_pay(num_rows):
            return False
        began = self._now()
        for request, state in hopeful:
            self._look(request, state)
            if request not in self._followed:
                self._lost[request] = state
        self._looked(len(hopeful), began)
        return True

    def _visit(self, num_steps: int) -> None:
        """Looks at some who are not followed, those of whom a guess may be right and all others in turns.

        As many as `num_steps` steps have time for.
        """
        most = float(len(self._states))
        num_new = num_steps * LOOK_SHARE * self._payoff.step_s / self._look_s
        self._visits = min(most, self._visits + num_new) if self._payoff.step_s else most
        num_visits = int(self._visits)
        self._visits -= num_visits
        began = self._now()
        self._look_at(num_visits)
        self._looked(num_visits, began)

    def _looked(self, num_looks: int, began: float) -> None:
        """So many looks have been taken since `began`."""
        if self._clock is not None and num_looks:
            self._look_s = smoothed(self._look_s, (self._now() - began) / num_looks, LOOK_MEMORY)

    def _look_at(self, num_visits: int) -> None:
        for _ in range(min(num_visits, len(self._states))):
            if self._lost and self._turn_of_lost:
                self._turn_of_lost = False
                request = next(iter(self._lost))
            else:
                self._turn_of_lost = True
                request = next(iter(self._states))
                self._states.move_to_end(request)
            if request.status is FINISHED:  # without a reply
                self._forget(request)
            elif request not in self._followed:
                self._look(request, self._states[request])

    def _end(self, request: Request) -> None:
        if request in self._states:
            self._forget(request)
            said = tuple(request.output_token_ids)
            if FAILED in said:
                said = said[: said.index(FAILED)]
            self._ended.append((request.cache_namespace, said))

    def _take_ended(self) -> None:
        ended, self._ended = self._ended, []
        self._finished.add(ended)

    def _sweep(self) -> None:
        for request in [each for each in self._states if each.status is FINISHED]:
            self._forget(request)
        self._swept_at = max(LEAST_SWEPT, 2 * len(self._states))

    def _forget(self, request: Request) -> None:
        del self._states[request]
        for states in (self._followed, self._predictable, self._lost, self._constrained, self._waiting):
            states.pop(request, None)


def _is_ready(request: Request) -> bool:
    """Whether its next step computes its newest token alone, which is known."""
    return request.status is RUNNING and not request.num_tokens_in_flight and request.is_decoding
