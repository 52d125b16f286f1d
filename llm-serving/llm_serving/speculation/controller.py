"""Decides which requests get draft tokens, how many, and whether drafts raise the throughput.

An accepted draft token saves its request a step; each draft token prolongs the step that verifies it. A step with
drafts can be formed only after the reply to the previous step. Drafts never change an answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple

from llm_serving.core.enums import Proposer
from llm_serving.core.request import FINISHED, RUNNING, Request
from llm_serving.core.step import MAX_DRAFT_REQUESTS
from llm_serving.core.timings import Clock
from llm_serving.speculation.draft_model import DraftModelProposer
from llm_serving.speculation.ngram import NgramProposer, RequestDrafts
from llm_serving.speculation.statistics import (
    MIN_ACCEPTANCE_RATE,
    Acceptance,
    MeasuredGain,
    MovingAverage,
    StepTimeModel,
    VerifiedDraft,
    no_time,
)

MIN_NGRAM_RATE: Final = 0.25
"""Minimum expected acceptance rate of an n-gram draft. With a draft model, `MIN_ACCEPTANCE_RATE` applies instead."""
MAX_RATE: Final = 0.98
_BEST_ACCEPTANCE: Final = Acceptance(MAX_RATE, MAX_RATE)
MIN_PRICE: Final = 1e-3
"""Lower bound of the relative cost of a draft token and of acceptance rates, so that their logarithms exist."""
RATE_PARTS: Final = 64
"""Acceptance rates are rounded down to multiples of 1/RATE_PARTS, so that draft lengths can be cached."""
MAX_DELAY: Final = 0.03
"""Maximum delay of requests without a draft, as a fraction of the step time, averaged over all running requests."""
MAX_ARRIVAL_DELAY: Final = 0.4
"""Maximum of (share of steps with prompts) * (time that drafts add to a step) / (step time). This limits the delay of
new requests, because they wait until the current step has finished.
"""
HOST_MEMORY: Final = 16
PROPOSAL_S: Final = 3e-6
MIN_CHECKED: Final = 32
"""`could_pay` is called before an update of the drafts only if at least this many requests have an n-gram match."""
UPDATE_SHARE: Final = 0.005
"""Maximum fraction of the step time for updates of n-gram drafts while drafts do not raise the throughput."""
PROMISING_SHARE: Final = 0.02
"""The same, while requests without a match have lookups that should save more than they cost."""
UPDATE_MEMORY: Final = 16
MAX_UPDATE_PERIOD: Final = 16
MIN_SWEPT: Final = 64
"""A new request triggers the removal of aborted requests only if more requests than this are tracked."""


class DraftCandidate(NamedTuple):
    acceptance: Acceptance
    max_tokens: float = math.inf
    """Maximum length in tokens. For tokens that a grammar forces: their expected number."""
    uses_model: bool = False


class GainModel:
    """Compares the tokens that drafts are expected to save with the measured cost of verifying them."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.step_s = 0.0
        self._max_draft_tokens = self._max_length = max_draft_tokens
        """`_max_length`: the maximum draft length that gives the highest throughput now."""
        self._best_drafts = [(each, expected_tokens(_BEST_ACCEPTANCE, each)) for each in {1, max_draft_tokens}]
        self._step_times = StepTimeModel()
        self._host = MovingAverage(HOST_MEMORY)
        self._proposal = MovingAverage(HOST_MEMORY, PROPOSAL_S)
        self._num_rows = 0
        self._rows_s = self._token_s = 0.0
        self._plans: dict[Acceptance, tuple[int, float]] = {}

    def record_step(self, num_tokens: int, seconds: float, host_s: float) -> None:
        """Record a decode step. `host_s`: by how long the wait for the previous step's reply delayed its start."""
        self._step_times.add(num_tokens, seconds)
        self._num_rows = 0
        self.step_s = seconds
        self._host.add(host_s)

    def record_proposal(self, seconds: float) -> None:
        self._proposal.add(seconds)

    def prepare(self, num_rows: int, num_drafted: int) -> None:
        """Set the step that the other methods assume: `num_rows` rows, `num_drafted` with the maximum draft length."""
        if self._num_rows != num_rows:
            self._num_rows, self._plans = num_rows, {}
            self._rows_s = self._step_times.step_s(num_rows)
            num_tokens = max(1, min(num_drafted, num_rows)) * self._max_length
            self._token_s = self._step_times.added_s(num_rows, num_tokens) / num_tokens

    def draft_length(self, acceptance: Acceptance, proposing_s: float = 0.0) -> int:
        """Return the largest draft length whose last token covers its cost, or 0. `proposing_s`: seconds per token."""
        first, further = min(acceptance.first, MAX_RATE), min(max(acceptance.further, MIN_PRICE), MAX_RATE)
        price = self._num_rows * (self._token_s + proposing_s) / self._rows_s if self._rows_s else 0.0
        if price >= first:
            return 0
        return min(self._max_length, 1 + int(math.log(max(price, MIN_PRICE) / first) / math.log(further)))

    def plan(self, acceptance: Acceptance) -> tuple[int, float]:
        """Return (draft length, expected number of accepted tokens) of the best draft, if proposing takes no time."""
        acceptance = rounded(acceptance)
        if (plan := self._plans.get(acceptance)) is None:
            length = self.draft_length(acceptance)
            plan = self._plans[acceptance] = length, expected_tokens(acceptance, length)
        return plan

    def pays(
        self,
        num_rows: int,
        num_drafted: int,
        candidates: Mapping[DraftCandidate, int],
        num_unmatched: int,
        pass_s: float,
        prompt_share: float = 0.0,
    ) -> bool:
        """Return whether drafts raise the throughput of a step, and set the maximum draft length to the best one.

        Drafts delay requests without a draft, and new requests. Return False if no length keeps both delays within
        limits. `num_rows`, `num_drafted`: see `prepare`. `candidates`: kind of draft -> number of requests with it.
        `num_unmatched`: requests that just lost their n-gram match; they do not count as requests without a draft.
        `pass_s`: seconds of a draft model's pass. `prompt_share`: fraction of the steps that compute prompts, or 0 if
        new requests wait for a slot anyway.
        """
        if not self.step_s or not num_rows:
            return True
        num_candidates = sum(candidates.values())
        num_delayed = max(0, num_rows - num_candidates - num_unmatched)
        host_s, best_length, best_rate = self._host.value + num_candidates * self._proposal.value, 0, 0.0
        length = min(self._max_draft_tokens, 2 * self._max_length)
        while length:
            self._num_rows, self._max_length = 0, length
            self.prepare(num_rows, num_drafted)
            max_delay_s = MAX_DELAY * num_rows * self._rows_s
            if num_delayed * host_s > max_delay_s:
                break
            gain, cost_s = self._balance(candidates, pass_s)
            cost_s += host_s
            rate = (num_rows + gain) / (self._rows_s + cost_s)
            is_fair = num_delayed * cost_s <= max_delay_s
            is_fair = is_fair and prompt_share * cost_s <= MAX_ARRIVAL_DELAY * self._rows_s
            if is_fair and rate > max(best_rate, num_rows / self._rows_s):
                best_length, best_rate = length, rate
            elif best_length:
                break
            length //= 2
        if best_length != self._max_length:
            self._num_rows, self._max_length = 0, best_length or self._max_draft_tokens
        return best_length > 0

    def could_pay(self, num_rows: int) -> bool:
        """Return whether drafts would raise the throughput if all requests had drafts accepted at rate `MAX_RATE`."""
        step_s, host_s = self._step_times.step_s(num_rows), self._host.value + num_rows * self._proposal.value
        if not step_s:
            return True
        for length, most_accepted in self._best_drafts:
            cost_s = host_s + self._step_times.added_s(num_rows, length * num_rows)
            if most_accepted > cost_s / step_s:
                return True
        return False

    def _balance(self, candidates: Mapping[DraftCandidate, int], pass_s: float) -> tuple[float, float]:
        num_draft_tokens, gain, longest, share_s = 0.0, 0.0, 0, 0.0
        if pass_s:
            share_s = pass_s / max(1, sum(num for candidate, num in candidates.items() if candidate.uses_model))
        for (acceptance, max_tokens, uses_model), num in candidates.items():
            if uses_model:
                length = self.draft_length(acceptance, share_s)
                accepted, longest = expected_tokens(acceptance, length), max(longest, length)
            else:
                length, accepted = self.plan(acceptance)
            num_draft_tokens += num * min(length, max_tokens)
            gain += num * min(accepted, max_tokens)
        return gain, longest * pass_s + self._step_times.added_s(self._num_rows, num_draft_tokens)


def alike(rate: float) -> Acceptance:
    return Acceptance(rate, rate)


def rounded(acceptance: Acceptance) -> Acceptance:
    first, further = acceptance
    return Acceptance(int(RATE_PARTS * first) / RATE_PARTS, int(RATE_PARTS * further) / RATE_PARTS)


def expected_tokens(acceptance: Acceptance, length: int) -> float:
    first, further = min(acceptance.first, MAX_RATE), min(acceptance.further, MAX_RATE)
    return first * (1 - further**length) / (1 - further)


class SpeculationController:
    """Proposes draft tokens for the requests of one engine. Only the engine's thread may call it."""

    def __init__(
        self,
        max_draft_tokens: int,
        ngram: NgramProposer,
        draft_model: DraftModelProposer | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`draft_model` serves requests without an n-gram match. `clock` measures updates and proposals, if given."""
        self._is_timed = clock is not None
        self._now: Clock = no_time if clock is None else clock
        self._model = draft_model
        self._ngram = ngram
        self._min_ngram_rate = MIN_NGRAM_RATE if draft_model is None else MIN_ACCEPTANCE_RATE
        self._predictable: dict[Request, RequestDrafts] = {}
        self._constrained: dict[Request, RequestDrafts] = {}
        self.waiting: dict[Request, RequestDrafts] = {}
        """Requests that get drafts even while `pays` is False: their steps are formed after the reply anyway."""
        self._update_time = MovingAverage(UPDATE_MEMORY)
        self._update_period = 1
        self._num_steps = 0
        self._sweep_at = MIN_SWEPT
        self.gain = GainModel(max_draft_tokens)
        """Measured costs of drafts. The engine records each step without prompts here."""
        self.measured = MeasuredGain()
        self.has_queue = False
        """Whether requests wait for a slot or for KV blocks. Then drafts cannot delay their first step."""
        self.pays = False
        """Whether drafts raise the throughput although a step with drafts must wait for the previous reply."""

    def add_request(self, request: Request) -> None:
        """Let `propose` make drafts for a request that starts to run, unless it is a beam search or for one token."""
        if request.is_beam or request.beam_search is not None or request.sampling.max_tokens <= 1:
            return
        if request in self._ngram.requests:
            return
        drafts = self._ngram.add_request(request, 0.0 if self._model is None else self._model.acceptance_rate)
        if request.matcher is not None:
            self._constrained[request] = drafts
        if request.needs_known_output:
            self.waiting[request] = drafts
        self._update_period = 1
        if len(self._ngram.requests) >= self._sweep_at:
            self._remove_aborted()
            self._sweep_at = max(MIN_SWEPT, 2 * len(self._ngram.requests))

    def propose(self, num_running: int, *, synchronous: bool) -> list[tuple[Request, list[int]]]:
        """Return (request, draft tokens) for the next step. `synchronous`: whether no step is in flight.

        With a step in flight, or while drafts do not raise the throughput, only the requests in `self.waiting` get
        drafts. Drafts do not delay these requests, because each of their steps must await the previous reply anyway.
        Raise WorkerError if the WorkAgent with the draft model has exited.
        """
        pays = synchronous and self.pays
        model = self._model_requests() if pays and self._model is not None else {}
        candidates = {}
        if pays:
            candidates = {**self._constrained, **self._predictable, **model}
        else:
            for request, drafts in self.waiting.items():
                if request in self._constrained or request in self._predictable:
                    candidates[request] = drafts
        if not candidates or not num_running:  # preempted requests are known, but only running ones get drafts
            return []
        self.gain.prepare(num_running, self._max_drafted)
        model_drafts = self._propose_by_model(model)
        began = self._now()
        proposed = []
        for request, drafts in candidates.items():
            if _is_ready(request):
                token_ids = self._propose_for(request, drafts, model_drafts.get(request, []))
                if token_ids:
                    proposed.append((request, token_ids))
        if self._is_timed and pays and proposed:
            self.gain.record_proposal((self._now() - began) / len(proposed))
        return proposed

    def record_verified(self, request: Request, num_draft_tokens: int, num_accepted: int) -> list[VerifiedDraft]:
        drafts, num_output = self._ngram.requests.get(request), len(request.output_token_ids)
        if drafts is None:
            return [VerifiedDraft(Proposer.NGRAM, num_draft_tokens, num_accepted)] if num_draft_tokens else []
        num_proposed = min(num_draft_tokens, drafts.num_proposed)
        num_forced, accepted = num_draft_tokens - num_proposed, min(num_accepted, num_proposed)
        if num_forced and accepted == num_proposed:
            drafts.record_forced(num_forced, num_accepted - accepted, num_output)
        if self._model is not None and drafts.proposer is self._model.proposer:
            self._model.record_verified(drafts, request, num_proposed, accepted)
        counts = (
            VerifiedDraft(drafts.proposer, num_proposed, accepted),
            VerifiedDraft(Proposer.FORCED, num_forced, num_accepted - accepted),
        )
        return [each for each in counts if each.num_draft_tokens]

    def record_step(self, finished: Iterable[Request], num_rows: int) -> None:
        answers = []
        for request in finished:
            if request in self._ngram.requests:
                self._remove(request)
                answers.append(request)
        self._ngram.add_finished(answers, num_rows)
        self._num_steps += 1
        if self._num_steps >= self._update_period:
            self._update(num_rows)
            self._num_steps = 0

    def _update(self, num_rows: int) -> None:
        began, step_s = self._now(), self.gain.step_s
        self._remove_aborted()
        if len(self._ngram.matched) >= MIN_CHECKED and not self.gain.could_pay(num_rows):
            self.pays, self._update_period = False, MAX_UPDATE_PERIOD
            return
        is_promising = self._ngram.update(num_rows, self._num_steps, step_s, partial(self.gain.could_pay, num_rows))
        self._predictable = {}
        for request, drafts in self._ngram.matched.items():
            if drafts.acceptance.first >= self._min_ngram_rate:
                self._predictable[request] = drafts
        model = {} if self._model is None else self._model_requests()
        has_drafts = bool(self._predictable or self._constrained or model) and not self.measured.is_paused
        self.pays = has_drafts and self._evaluate(num_rows, model)
        if self.pays:
            self._update_period = 1
        else:
            self._update_time.add(self._now() - began)
            share = PROMISING_SHARE if is_promising else UPDATE_SHARE
            period = self._update_time.value / (share * step_s) if step_s else 0
            self._update_period = max(1, min(2 * self._update_period, round(period), MAX_UPDATE_PERIOD))

    def _model_requests(self) -> dict[Request, RequestDrafts]:
        """Return the requests that may use the draft model, or none while any request is preempted or in prefill."""
        assert self._model is not None
        candidates = {}
        for request, drafts in self._ngram.requests.items():
            if request.status is not RUNNING or not request.is_decoding:
                return {}
            if request not in self._predictable and drafts.may_use_model(len(request.output_token_ids)):
                candidates[request] = drafts
        return {request: candidates[request] for request in self._model.select(list(candidates))}

    def _propose_by_model(self, requests: Mapping[Request, RequestDrafts]) -> dict[Request, list[int]]:
        if self._model is None or not requests:
            return {}
        pass_s = self._model.pass_s / len(requests)
        proposed = self._model.propose(
            [
                (request, self.gain.draft_length(alike(drafts.model_rate), pass_s))
                for request, drafts in requests.items()
                if _is_ready(request)
            ]
        )
        for request, token_ids in proposed.items():
            if not token_ids:
                self._record_useless(request, requests[request])
        return proposed

    def _record_useless(self, request: Request, drafts: RequestDrafts) -> None:
        """Count a proposal without usable tokens as a rejected token, so that the draft model is used less often."""
        assert self._model is not None
        self._model.record_verified(drafts, request, 1, 0)

    def _propose_for(self, request: Request, drafts: RequestDrafts, model_draft: list[int]) -> list[int]:
        output = request.output_token_ids
        token_ids, drafts.proposer = model_draft, Proposer.NGRAM if self._model is None else self._model.proposer
        if request in self._predictable and drafts.compare(output):
            token_ids = drafts.lookup.propose(self.gain.plan(drafts.acceptance)[0])
            drafts.proposer = Proposer.NGRAM
        drafts.num_proposed = len(token_ids)
        if request.matcher is None:
            return token_ids
        rate = drafts.forced_rate
        max_forced = self.gain.draft_length(alike(rate)) if rate >= MIN_ACCEPTANCE_RATE else 0
        if not token_ids and not max_forced:
            return []
        allowed = request.matcher.constrain_draft(output, token_ids, max(len(token_ids), max_forced))
        if not token_ids and not allowed:
            drafts.record_forced(0, 0, len(output))
        while allowed[: drafts.num_proposed] != token_ids[: drafts.num_proposed]:
            drafts.num_proposed -= 1
        if model_draft and not drafts.num_proposed and drafts.proposer is not Proposer.NGRAM:
            self._record_useless(request, drafts)
        return allowed

    @property
    def _max_drafted(self) -> int:
        num_drafted = len(self._predictable) + len(self._constrained)
        return num_drafted if self._model is None else num_drafted + MAX_DRAFT_REQUESTS

    def _evaluate(self, num_rows: int, model: Mapping[Request, RequestDrafts]) -> bool:
        candidates = Counter(DraftCandidate(rounded(drafts.acceptance)) for drafts in self._predictable.values())
        for drafts in model.values():
            candidates[DraftCandidate(alike(drafts.model_rate), uses_model=True)] += 1
        for request, drafts in self._constrained.items():
            if request in self._predictable or request in model or request.status is not RUNNING:
                continue
            if drafts.forced_rate >= MIN_ACCEPTANCE_RATE:
                num_forced = drafts.forced_tokens(len(request.output_token_ids))
                candidates[DraftCandidate(alike(drafts.forced_rate), num_forced)] += 1
        num_unmatched = 0
        for request, drafts in self._ngram.unmatched.items():
            num_unmatched += drafts.match_rate >= MIN_ACCEPTANCE_RATE and request.status is RUNNING
        pass_s = 0.0 if self._model is None else self._model.pass_s
        share = 0.0 if self.has_queue else self.measured.prompt_share
        return self.gain.pays(num_rows, self._max_drafted, candidates, num_unmatched, pass_s, share)

    def _remove_aborted(self) -> None:
        for request in list(self._ngram.requests):
            if request.status is FINISHED:
                self._remove(request)

    def _remove(self, request: Request) -> None:
        ngram = self._ngram
        del ngram.requests[request]
        for requests in (ngram.matched, ngram.unmatched, self._predictable, self._constrained, self.waiting):
            requests.pop(request, None)


def _is_ready(request: Request) -> bool:
    return request.status is RUNNING and not request.num_tokens_in_flight and request.is_decoding
