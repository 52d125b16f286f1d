"""How long a request can be made to wait: computed from the limits, and watched while the server runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class ClassBounds:
    """What holds for every request of a class, in steps; each test of the scheduler checks it."""

    name: str
    max_admission_steps: int
    """From being first in the order of its class, and its class not at the limit of its shares, to being admitted."""
    max_decode_gap: int
    """Steps in a row that leave out a running request which decodes."""
    max_preemptions: int
    """Times it may lose its place."""

    def __str__(self) -> str:
        return (
            f"{self.name}: first in its order, admitted within {self.max_admission_steps} steps; running, left out of "
            f"at most {self.max_decode_gap} steps in a row and preempted at most {self.max_preemptions} times"
        )


def class_bounds(
    limits: SchedulerLimits, classes: Sequence[RequestClass], num_blocks: int, block_size: int, max_decode_gap: int
) -> list[ClassBounds]:
    """The bounds of each class.

    What runs at one moment has ended `drain` steps later: prompts get the first share of a step at least every
    `max_prefill_gap + 2` steps, each such step computes the whole budget or `max_prefill_seqs` prompts to their end,
    and no more tokens than the cache holds can be left to compute, nor more come in meanwhile; then each request gets a
    token at least every `max_decode_gap + 1` steps, until it is as long as it can be. So of the `drain` steps after any
    moment, either as many requests are admitted as fit side by side, however long, or the one that is next is among
    them: if fewer had come, there would have been room for it.

    How many may come before it: a class that has waited `ageing_steps` takes turns with the others by weight, and the
    first of its order may be overtaken `max_overtakes` times.

    Args:
        limits: Of the scheduler.
        classes: All of them.
        num_blocks: Blocks of the cache.
        block_size: Tokens of a block.
        max_decode_gap: Of the policy.
    """
    longest = min(limits.max_model_len, num_blocks * block_size)
    num_prefill_steps = _ceil(2 * num_blocks * block_size, limits.max_num_batched_tokens)
    num_prefill_steps += _ceil(2 * limits.max_num_seqs, limits.max_prefill_seqs)
    drain = (limits.max_prefill_gap + 2) * num_prefill_steps + (max_decode_gap + 1) * longest
    # One block is kept free for each running request when another is admitted.
    num_side_by_side = (num_blocks - limits.max_num_seqs) // _ceil(longest, block_size)
    num_admitted = max(1, min(limits.max_num_seqs, num_side_by_side))
    bounds = []
    for each in classes:
        others = (other for other in classes if other is not each)
        num_turns = 1 + sum(_ceil(other.weight, each.weight) + 1 for other in others)
        num_drains = _ceil((limits.max_overtakes + 1) * num_turns, num_admitted)
        steps = each.ageing_steps + num_drains * (drain + 1)
        bounds.append(ClassBounds(each.name, steps, max_decode_gap, limits.max_preemptions))
    return bounds


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


class WaitMonitor:
    """Counts the requests that wait longer for admission than their class's bound."""

    def __init__(self, bounds: Sequence[ClassBounds]) -> None:
        self._limits = {each.name: each.max_admission_steps for each in bounds}
        self._firsts: dict[str, tuple[int, int]] = {}
        """`Request.sequence` of the first of each class, and the step since which it has been that."""

    def observe(self, waiting: WaitingQueue, step: int, closed: Collection[str]) -> int:
        """Looks at the queue after step `step` was formed; returns how many bounds were broken by it."""
        violations = 0
        for name, queue in waiting.queues.items():
            first = queue.oldest()
            if first is None or name in closed:
                self._firsts.pop(name, None)
                continue
            known, since = self._firsts.get(name, (None, step))
            if known != first.sequence:
                self._firsts[name] = (first.sequence, step)
                continue
            first.num_steps_as_first = max(first.num_steps_as_first, step - since)
            if step - since == self._limits[name] + 1:
                violations += 1
        return violations
