"""How long a request can be made to wait, computed from the limits.

Watches, while the server runs, that nobody waits longer than was promised.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.window import Window
from llm_serving.scheduler.fair_sharing import max_decode_gap
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.policies import Policy


@dataclass(frozen=True, slots=True)
class ClassBounds:
    """What holds for every request of a class, whatever clients send; each test of the scheduler checks it."""

    name: str
    max_decode_gap: int
    """Steps in a row that leave out a running request which decodes."""
    max_preemptions: int
    """Times it may lose its place."""
    first_steps: int
    """From its arrival until its class has had its turn, and the places of its share have become free once."""
    steps_per_admission: float
    """For each request of its class that is admitted before it."""
    max_overtakes: int
    """Requests that may be admitted before each that came earlier, and before it."""
    max_prompt_gap: int
    """Steps in a row that leave out a running request whose prompt is not computed yet."""

    def max_wait_steps(self, num_ahead: int, num_returning: int = 0) -> int:
        """From its arrival to its first admission.

        Args:
            num_ahead: Requests of its class that wait to be admitted first when it comes.
            num_returning: Those that have been admitted, and lose their places perhaps, or have lost them.
        """
        num_admissions = (num_ahead + 1) * (self.max_overtakes + 1) + num_returning
        return self.first_steps + math.ceil(num_admissions * self.steps_per_admission)

    def __str__(self) -> str:
        return self.describe(None)

    def describe(self, step_s: float | None) -> str:
        """Return one line with all bounds, and with the waits in seconds if the time of a step is known."""
        alone, more = self.max_wait_steps(0), self.max_wait_steps(1) - self.max_wait_steps(0)
        seconds = ["" if step_s is None else f" ({steps * step_s:.3g} s)" for steps in (alone, more)]
        return (
            f"{self.name}: a request waits at most {alone} engine steps{seconds[0]} before its prompt starts, when no"
            f" request of its class is ahead, and {more} more{seconds[1]} for each one that is; while it runs, at most"
            f" {self.max_decode_gap} steps in a row leave it out ({self.max_prompt_gap} while its prompt is computed),"
            f" and it is preempted at most {self.max_preemptions} times"
        )


def longest_waits(bounds: Sequence[ClassBounds]) -> str:
    """Return one sentence with the longest wait of each class."""
    waits = " or ".join(f"{each.max_wait_steps(0)} ({each.name})" for each in bounds)
    return (
        f"a request waits at most {waits} engine steps before its prompt starts, when no request of its class is ahead"
    )


def class_bounds(
    limits: SchedulerLimits,
    classes: Sequence[RequestClass],
    num_blocks: int,
    block_size: int,
    policy: Policy,
    window: Window | None = None,
    num_running: int = 0,
) -> list[ClassBounds]:
    """The bounds of each class.

    A request that has a place makes progress of at least one token in every step but those that are full of others'
    prompts, so it ends after at most as many steps as it can have tokens, and those. Prompts of `n` tokens fill at most
    `n` times the steps of `_steps_a_prompt_token`; those of other classes leave out what decodes of a class that
    contends in `max_decode_gap` steps for each of its tokens, of the policy or of its weight, whichever is less.

    Of what becomes free, a class that contends gets its weight's part, in service: as many of its requests side by side
    as that part of the places and of the cache holds at full length, or, where that is less than one, one request for
    that part of the time. At first those that run have to end, and what its class had more than its part before may be
    paid back.

    Neither is paid twice. While its tokens are computed, `a` steps for each, a class that has the share `d` of the
    places or of the cache pays `d` in every step. The others pay for a whole step in a - 1 of these, which their
    prompts fill, and in the last for what is left beside it, 1 - d. By its weight `w` of a sum `s` their service comes
    to (s - w) / w of its own: a - d = a * d * (s - w) / w. So a token takes a / d = a * (s - w) / w + 1 times the steps
    that it took if all places were of its class.

    Of the tokens that a request can have, each is computed once in its prompt or by itself, the first in its prompt;
    and all of them in a prompt for each time that it loses its place.

    A request whose next token depends on more than its newest one gets none while that is on its way, which is so for
    all the steps that are formed ahead.

    Where several schedulers serve, a class that is ahead of its share of all counts here with a `least_part` of its
    weight while the others count with theirs. So that is its part here; it pays for service as many times as much then,
    and when it is no longer ahead it may have to let others catch up with a turn of that.

    Who goes first within the class is up to the order but for one of `max_overtakes` + 1 admissions, which is the
    oldest's. So with `n` ahead, (n + 1) * (max_overtakes + 1) admissions bring its turn, and one for each that has been
    admitted before: whoever loses its place comes back ahead of its class and overtakes nobody.

    A prompt that has a place goes on in the order of admission once its class has aged and has had its turn: before it
    are those of its class that have places too, and at most as many tokens as the cache holds.

    Where more run than there are places, as there were more when they were admitted, nobody is admitted until so many
    have ended. Until then each step has room for a token of each, and what that leaves for prompts may be less.

    Where windows slide, a request holds no more than its window and a step, so more of the longest run side by side,
    and those that run have more tokens than the cache; where it has no room for a whole step, steps are shorter.

    Args:
        limits: Of the scheduler.
        classes: All of them, in ascending order of rank.
        num_blocks: Blocks of the cache.
        block_size: Tokens of a block.
        policy: What steps begin with.
        window: What a request needs of the cache; None: all of it.
        num_running: Requests that have places already.
    """
    window = Window() if window is None else window
    longest = min(limits.max_model_len, window.max_request_tokens(block_size, num_blocks))
    longest_blocks = window.max_blocks_of(longest, block_size, num_blocks)
    # One block is kept free for each running request when another is admitted.
    num_side_by_side = (num_blocks + 1) // (longest_blocks + 1)
    num_places = max(1, min(limits.max_num_seqs, num_side_by_side))
    # Tokens of all that run: a block stands for those it holds, or for its part of a sequence that slides.
    a_block, chunk = Fraction(block_size), limits.max_num_batched_tokens
    if longest > longest_blocks * block_size:
        a_block = Fraction(longest, longest_blocks)
        chunk = min(chunk, window.min_chunk(block_size, num_blocks))
    cache_tokens = num_blocks * a_block
    a_prompt_token = _steps_a_prompt_token(limits, policy, chunk)
    crowded = replace(
        limits,
        max_num_seqs=max(limits.max_num_seqs, num_running),
        max_num_batched_tokens=max(limits.max_num_batched_tokens, num_running),
    )
    a_token_now = max(a_prompt_token, _steps_a_prompt_token(crowded, policy, chunk))
    sum_of_weights = sum(each.weight for each in classes)
    bounds = []
    for each in classes:
        is_highest = each is classes[0]
        part = Fraction(each.weight, each.weight + limits.weight_divisor * (sum_of_weights - each.weight))
        a_token = limits.max_steps_in_flight
        if crowded.max_num_seqs > 1 and each.weight < sum_of_weights:
            # Prompts of others leave out what decodes only where they have places beside it.
            a_token += min(policy.max_decode_gap, max_decode_gap(each.weight, sum_of_weights))
        # Whoever loses its place is computed again.
        num_again = 0 if is_highest and num_places == limits.max_num_seqs else limits.max_preemptions
        as_prompt = a_prompt_token / part
        decoding = (a_token * (1 / part - 1) + limits.max_steps_in_flight) / num_places
        service = as_prompt + (longest - 1) * max(as_prompt, decoding)
        service += num_again * longest * as_prompt + (1 + num_again) * _steps_a_prompt(limits) / part
        until_free = longest * a_token + cache_tokens * a_token_now + crowded.max_num_seqs * _steps_a_prompt(limits)
        turns = (len(classes) - 1) * limits.quantum_steps * limits.weight_divisor
        ageing = 0 if is_highest else each.ageing_steps
        first = ageing + math.ceil((until_free + turns) / part)
        num_others = crowded.max_num_seqs - 1
        tokens_before = min(Fraction(num_others * longest), cache_tokens)
        prompts = tokens_before * a_token_now + num_others * _steps_a_prompt(limits) + _prompt_gap(limits, policy) + 2
        bounds.append(
            ClassBounds(
                each.name,
                policy.max_decode_gap,
                limits.max_preemptions,
                first,
                float(service),
                limits.max_overtakes,
                ageing + math.ceil((prompts + turns) / part),
            )
        )
    return bounds


def _steps_a_prompt_token(limits: SchedulerLimits, policy: Policy, chunk: int) -> Fraction:
    """Steps that one token of a prompt can take from those that decode, or from other prompts.

    `chunk`: tokens of a prompt that a step always has room for.
    """
    budget = limits.max_num_batched_tokens
    left_by_decoding = 0 if limits.separate else budget - limits.max_num_seqs
    rates = [Fraction(_prompt_gap(limits, policy) + 2, min(budget, chunk))]
    if policy.fills_steps and left_by_decoding > 0:
        rates.append(Fraction(1, min(left_by_decoding, chunk)))
    return min(rates)


def _prompt_gap(limits: SchedulerLimits, policy: Policy) -> int:
    """Steps in a row that begin with decoding although prompts wait."""
    return limits.max_prefill_gap if policy.max_prompt_gap is None else policy.max_prompt_gap


def _steps_a_prompt(limits: SchedulerLimits) -> Fraction:
    """Steps that a prompt can take however short it is: a step has room for few, or for nothing else."""
    return Fraction(1, 1 if limits.separate else limits.max_prefill_seqs)


MIN_HEAP: Final = 64
"""Entries of a heap that are not worth tidying up."""


class _Due(NamedTuple):
    """A wait that breaks its bound; told from others of the same request by identity."""

    clock: int
    """Of its class, when that happens."""
    sequence: int
    since: int
    """What the clock of its class showed when it began to wait."""


class WaitMonitor:
    """Counts the requests that wait longer to be admitted than they were promised.

    It has a clock for each class, which counts the steps the class could take part in. No step counts in which a beam
    of a search is under way: beams wait for each other, and how long that takes no limit says.
    """

    def __init__(self, bounds: Sequence[ClassBounds]) -> None:
        self._bounds = {each.name: each for each in bounds}
        self._clocks = dict.fromkeys(self._bounds, 0)
        self._due: dict[str, list[_Due]] = {each.name: [] for each in bounds}
        """Heaps; of those that wait no longer some linger."""
        self._waits: dict[int, _Due] = {}
        """The newest of each that waits, by its sequence."""

    def start_wait(self, request: Request, num_ahead: int, num_returning: int = 0, num_waited: int = 0) -> None:
        """The request waits from now on, behind so many of its class, and has waited so many steps in another."""
        name = request.request_class.name
        clock, bound = self._clocks[name], self._bounds[name].max_wait_steps(num_ahead, num_returning)
        if not request.has_run:
            request.wait_bound = num_waited + bound
        wait = self._waits[request.sequence] = _Due(clock + bound + 1, request.sequence, clock - num_waited)
        due = self._due[name]
        if len(due) > 2 * len(self._waits) + MIN_HEAP:
            due[:] = [each for each in due if self._is_current(each)]
            heapq.heapify(due)
        heapq.heappush(due, wait)

    def record_admission(self, request: Request) -> None:
        """The request waits no longer."""
        wait = self._waits.pop(request.sequence)
        if not request.has_run:
            request.num_steps_waited = self._clocks[request.request_class.name] - wait.since

    def is_watching(self, request: Request) -> bool:
        """Whether it waits and was promised something."""
        return request.sequence in self._waits

    def num_steps_waited(self, request: Request) -> int:
        """Steps that have been counted since it began to wait."""
        return self._clocks[request.request_class.name] - self._waits[request.sequence].since

    def forget(self, request: Request) -> None:
        """The request has ended, wherever it was."""
        self._waits.pop(request.sequence, None)

    def tick(self, closed: Collection[str]) -> int:
        """A step has been formed, and classes in `closed` took no part; returns how many bounds it broke."""
        violations = 0
        for name, due in self._due.items():
            if name not in closed:
                self._clocks[name] += 1
            while due and (due[0].clock <= self._clocks[name] or not self._is_current(due[0])):
                violations += self._is_current(heapq.heappop(due))
        return violations

    def _is_current(self, due: _Due) -> bool:
        """Whether it has waited all the time."""
        return self._waits.get(due.sequence) is due
