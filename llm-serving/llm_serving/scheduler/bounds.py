"""Guaranteed maximum waits of each request class, and a monitor that counts the waits that exceed them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.fair_sharing import max_decode_gap
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.policies import Policy

MIN_HEAP: Final = 64
"""Outdated entries are removed from a heap once it has more than `MIN_HEAP` + 2 n entries for n waiting requests."""


@dataclass(frozen=True, slots=True)
class ClassBounds:
    name: str
    max_decode_gap: int
    """Maximum number of consecutive steps that give a decoding request no token."""
    max_preemptions: int
    first_steps: int
    """Maximum number of steps until a class without other requests can admit a request that arrives."""
    steps_per_admission: float
    max_overtakes: int
    max_prompt_gap: int
    """Maximum number of consecutive steps that compute no token of a running request whose prompt is incomplete."""

    def max_wait_steps(self, num_ahead: int, num_returning: int = 0) -> int:
        """Return the maximum number of steps from arrival to first admission. `num_ahead`: earlier requests of the
        class that were never admitted. `num_returning`: requests that may be preempted and admitted again.
        """
        num_admissions = (num_ahead + 1) * (self.max_overtakes + 1) + num_returning
        return self.first_steps + math.ceil(num_admissions * self.steps_per_admission)

    def __str__(self) -> str:
        return self.describe(None)

    def describe(self, step_s: float | None) -> str:
        alone, more = self.max_wait_steps(0), self.max_wait_steps(1) - self.max_wait_steps(0)
        seconds = ["" if step_s is None else f" ({steps * step_s:.3g} s)" for steps in (alone, more)]
        return (
            f"{self.name}: a request waits at most {alone} engine steps{seconds[0]} before its prompt starts, when no"
            f" request of its class is ahead, and {more} more{seconds[1]} for each one that is; while it runs, at most"
            f" {self.max_decode_gap} steps in a row leave it out ({self.max_prompt_gap} while its prompt is computed),"
            f" and it is preempted at most {self.max_preemptions} times"
        )


def longest_waits(bounds: Sequence[ClassBounds]) -> str:
    waits = " or ".join(f"{each.max_wait_steps(0)} ({each.name})" for each in bounds)
    return (
        f"a request waits at most {waits} engine steps before its prompt starts, when no request of its class is ahead"
    )


def class_bounds(
    limits: SchedulerLimits, classes: Sequence[RequestClass], policy: Policy, blocks: BlockManager, num_running: int
) -> list[ClassBounds]:
    """Return for each class how many steps a request waits at most: for its admission, and between two tokens."""
    # The bounds follow from these arguments:
    # Progress: a running request computes a token in each step that other prompts do not fill. Prompts of `n` tokens
    #   fill at most `n * _steps_per_prompt_token` steps. Other prompts delay each token of a contending class by at
    #   most `max_decode_gap` steps: the minimum of the policy's gap and the gap of the class's weight.
    # Share: a contending class gets its weight's share of the slots and blocks that become free, once the requests that
    #   ran at its arrival have finished and other classes have caught up with service that it received above its share.
    #   The number of its requests that run in parallel is the number that fits into this share at full length. If less
    #   than one fits, one request runs for that fraction of the time.
    # Gap and share together: the gap makes a token take `a` steps, and the class has the fraction `d` of slots or
    #   cache. In these steps the class is charged a * d, and the other classes a - d. With the weight `w` of the sum
    #   `s`, fair sharing makes the others' charge (s - w) / w times that of the class: a - d = a * d * (s - w) / w. So
    #   a token takes a / d = a * (s - w) / w + 1 times the steps that it needs if the class has all slots.
    # Recomputation: each preemption computes the tokens of a request once more, as a prompt. A request with
    #   `needs_known_output` computes nothing while its latest token is in flight.
    # Several replicas: the weight of a class that exceeds its share across all replicas is divided by `weight_divisor`,
    #   and the quantum is multiplied by it.
    # Order: at least one of every `max_overtakes` + 1 admissions admits the oldest request, and preempted requests
    #   return before all others.
    # Prompts: a running prompt waits at most for the prompts of its class that fit into the cache.
    # Reload: if more requests run than there are slots, no request is admitted until enough have finished.
    # Whole prompts: a prompt that does not fit into one step is computed in the next. So two consecutive steps together
    #   compute at least `max_num_batched_tokens`, or all waiting prompts.
    # Sliding windows: in a group of layers with a window, a request holds blocks for at most its window and one step,
    #   so more of the longest requests run in parallel.
    num_blocks, block_size, groups = blocks.pool.num_blocks, blocks.block_size, blocks.groups
    longest = min(limits.max_model_len, groups.max_request_tokens(block_size, num_blocks))
    longest_blocks = groups.max_blocks_of(longest, block_size, num_blocks)
    # One block of each group is kept free for each running request when another is admitted.
    num_kept = len(groups.windows)
    num_side_by_side = (num_blocks + num_kept) // (longest_blocks + num_kept)
    num_slots = max(1, min(limits.max_num_seqs, num_side_by_side))
    # Tokens of all running requests; with a sliding window, a block stands for its part of the whole sequence.
    tokens_per_block, chunk = Fraction(block_size), limits.max_num_batched_tokens
    if limits.whole_prompts:
        chunk = (chunk + 1) // 2  # two consecutive steps fill more than one, or compute all prompts that wait
    if longest > longest_blocks * block_size:
        tokens_per_block = Fraction(longest, longest_blocks)
    if groups.is_sliding:
        chunk = min(chunk, groups.min_chunk(block_size, num_blocks))
    cache_tokens = num_blocks * tokens_per_block
    steps_per_prompt_token = _steps_per_prompt_token(limits, policy, chunk)
    limits_now = replace(
        limits,
        max_num_seqs=max(limits.max_num_seqs, num_running),
        max_num_batched_tokens=max(limits.max_num_batched_tokens, num_running),
    )
    first_prompt_token = max(steps_per_prompt_token, _steps_per_prompt_token(limits_now, policy, chunk))
    sum_of_weights = sum(each.weight for each in classes)
    bounds = []
    for each in classes:
        is_highest = each is classes[0]
        part = Fraction(each.weight, each.weight + limits.weight_divisor * (sum_of_weights - each.weight))
        steps_per_token = limits.max_steps_in_flight
        if limits_now.max_num_seqs > 1 and each.weight < sum_of_weights:
            # Prompts leave out decoding requests only if other requests have slots.
            steps_per_token += min(policy.max_decode_gap, max_decode_gap(each.weight, sum_of_weights))
        num_again = 0 if is_highest and num_slots == limits.max_num_seqs else limits.max_preemptions
        as_prompt = steps_per_prompt_token / part
        decoding = (steps_per_token * (1 / part - 1) + limits.max_steps_in_flight) / num_slots
        service = as_prompt + (longest - 1) * max(as_prompt, decoding)
        service += num_again * longest * as_prompt + (1 + num_again) * _steps_per_prompt(limits) / part
        until_free = longest * steps_per_token + cache_tokens * first_prompt_token
        until_free += limits_now.max_num_seqs * _steps_per_prompt(limits)
        quanta = (len(classes) - 1) * limits.quantum_steps * limits.weight_divisor
        ageing = 0 if is_highest else each.ageing_steps
        first = ageing + math.ceil((until_free + quanta) / part)
        num_others = limits_now.max_num_seqs - 1
        tokens_before = min(Fraction(num_others * longest), cache_tokens)
        prompts = tokens_before * first_prompt_token + num_others * _steps_per_prompt(limits)
        prompts += _prompt_gap(limits, policy) + 2
        bounds.append(
            ClassBounds(
                each.name,
                policy.max_decode_gap,
                limits.max_preemptions,
                first,
                float(service),
                limits.max_overtakes,
                ageing + math.ceil((prompts + quanta) / part),
            )
        )
    return bounds


def _steps_per_prompt_token(limits: SchedulerLimits, policy: Policy, chunk: int) -> Fraction:
    """Return the maximum number of steps by which one prompt token of a request delays other requests. `chunk`: number
    of prompt tokens that a step can always compute if it begins with prompts.
    """
    budget = limits.max_num_batched_tokens
    left_by_decoding = 0 if limits.separate else budget - limits.max_num_seqs
    rates = [Fraction(_prompt_gap(limits, policy) + 2, min(budget, chunk))]
    if policy.fills_steps and left_by_decoding > 0:
        rates.append(Fraction(1, min(left_by_decoding, chunk)))
    return min(rates)


def _prompt_gap(limits: SchedulerLimits, policy: Policy) -> int:
    return limits.max_prefill_gap if policy.max_prompt_gap is None else policy.max_prompt_gap


def _steps_per_prompt(limits: SchedulerLimits) -> Fraction:
    return Fraction(1, 1 if limits.separate else limits.max_prefill_seqs)


class _Due(NamedTuple):
    """Heap entry of a waiting request. Its wait exceeds the bound once its class has counted `clock` steps."""

    clock: int
    sequence: int
    since: int
    """Value of the class's clock at which the wait began."""


class WaitMonitor:
    """Counts the requests whose wait for admission exceeds its bound. Each class has a clock, which counts the steps
    that could have scheduled the class. While a beam search runs, all clocks stop, because beams may wait for each
    other without a bound.
    """

    def __init__(self, bounds: Sequence[ClassBounds]) -> None:
        self._bounds = {each.name: each for each in bounds}
        self._clocks = dict.fromkeys(self._bounds, 0)
        self._due: dict[str, list[_Due]] = {each.name: [] for each in bounds}
        self._waits: dict[int, _Due] = {}

    def start_wait(self, request: Request, num_ahead: int, num_returning: int = 0, num_waited: int = 0) -> None:
        """Monitor the wait of a request that has already waited `num_waited` steps, in another class or before a
        reload. `num_ahead`, `num_returning`: see `ClassBounds.max_wait_steps`.
        """
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
        wait = self._waits.pop(request.sequence)
        if not request.has_run:
            request.num_steps_waited = self._clocks[request.request_class.name] - wait.since

    def is_watching(self, request: Request) -> bool:
        return request.sequence in self._waits

    def num_steps_waited(self, request: Request) -> int:
        return self._clocks[request.request_class.name] - self._waits[request.sequence].since

    def forget(self, request: Request) -> None:
        self._waits.pop(request.sequence, None)

    def tick(self, closed: Collection[str]) -> int:
        """Count a step for each class, except those in `closed`. Return how many requests now wait longer than their
        bound. `closed`: classes at their share limit, or all classes while a beam search runs.
        """
        violations = 0
        for name, due in self._due.items():
            if name not in closed:
                self._clocks[name] += 1
            while due and due[0].clock <= self._clocks[name]:
                violations += self._is_current(heapq.heappop(due))
        return violations

    def _is_current(self, due: _Due) -> bool:
        return self._waits.get(due.sequence) is due
