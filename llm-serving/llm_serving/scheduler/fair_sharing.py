"""The share of each class while several contend: weights, paid in service.

A class pays for what it gets of the machine: of the places that requests run in, of the tokens of a step and of the
blocks of the cache, whichever is the largest share (dominant resource, Ghodsi et al. 2011). Whoever has paid least for
its weight is next (stride scheduling, Waldspurger and Weihl 1995). Whose prompts come first in a step is decided by
tokens alone: who holds a place and gets no tokens would otherwise pay for the place, and never be first.

Where several schedulers serve, shares are those of the whole: a class that has had more than its share of all of them
counts here with a part of its weight, until it has not. So it never gets less than that part here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.limits import SchedulerLimits

WHOLE: Final = 2**16
"""Service of a whole step."""
SCALE: Final = 2**23
"""Several times the largest weight, so that large ones are told apart; what is paid has 63 bits all the same."""
_NOTHING: Final[tuple[int, ...]] = (0, 0, 0)


class ClassUsage(NamedTuple):
    """What a class has had of one scheduler since that was last told."""

    service: int
    """Over its weight."""
    quantum: int
    """That of a turn: `turn_steps` whole steps."""
    has_demand: bool
    """Whether it contends and has somebody who waits."""


class WeightedFairSharing:
    """Who contends, what they have paid, which places and blocks are theirs.

    The highest class that is present contends always. One below it begins to when its oldest waiting request has waited
    `ageing_steps`, or a prompt of it has not been computed so long after it was given a place, and goes on until it
    holds no place or has nobody above it.
    """

    def __init__(self, classes: Sequence[RequestClass], limits: SchedulerLimits, num_blocks: int) -> None:
        """Classes in ascending order of rank; `num_blocks` of the cache."""
        self._names = [each.name for each in classes]
        self._weights = {each.name: each.weight for each in classes}
        self._num_slots = limits.max_num_seqs
        self._budget = limits.max_num_batched_tokens
        self._num_blocks = num_blocks
        self._quantum_steps = limits.quantum_steps
        self._is_shared = limits.num_schedulers > 1
        self._weight_divisor = limits.weight_divisor
        self.deprioritized: frozenset[str] = frozenset()
        """Classes that have had more than their share of all schedulers."""
        self._service = dict.fromkeys(self._names, 0)
        """Over weight, since it was told."""
        self._with_demand: set[str] = set()
        """Classes that contended in the newest step and had somebody who waited."""
        self._usage = dict.fromkeys(self._names, _NOTHING)
        """Service over weight, in places, tokens and blocks; only differences count."""
        self._prefill_usage = dict.fromkeys(self._names, 0)
        """Tokens over weight, beyond those of whoever got least of the classes that wanted more."""
        self._aged: set[str] = set()
        self.contenders: list[str] = []
        """By rank."""

    def update_contenders(self, waiting: Collection[str], aged: Collection[str], held: Mapping[str, int]) -> None:
        """Who contends from now on.

        Args:
            waiting: Classes with somebody who waits and may be admitted.
            aged: Those in which somebody has waited long enough for a place or for its prompt.
            held: Places of each class.
        """
        contenders: list[str] = []
        nobody_above_waits = True
        for name in self._names:
            if name in aged:
                self._aged.add(name)
            elif not held[name]:
                self._aged.discard(name)
            if name not in waiting and not held[name]:
                continue
            if not contenders:
                self._aged.discard(name)
            if not contenders or name in self._aged or (nobody_above_waits and name in waiting):
                contenders.append(name)
            nobody_above_waits = nobody_above_waits and name not in waiting
        self.contenders = contenders

    def next_class(self, waiting: Collection[str], held: Mapping[str, int], blocks: Mapping[str, int]) -> str | None:
        """The class to be admitted next, of those with somebody who waits and may be; None: there is none.

        Of those that hold less than their places and their blocks the one that has paid least, else the highest. But
        who has had a turn more than another that waits, by tokens perhaps, lets that have more than its places.
        """
        contenders = [name for name in self.contenders if name in waiting]
        if not contenders:
            return None
        parts = {name: self._effective_weight(name) for name in self.contenders}
        total = sum(parts.values())
        entitled = [
            name
            for name in contenders
            if held[name] * total < self._num_slots * parts[name]
            and blocks[name] * total < self._num_blocks * parts[name]
        ]
        if not entitled:
            return contenders[0]
        name, least = (
            min(each, key=self._virtual_time) for each in (entitled, contenders)
        )  # of equals the highest class
        turn = self._quantum_steps * (WHOLE // self._num_slots) * self._scale(name)
        return name if self._virtual_time(name) <= self._virtual_time(least) + turn else least

    def next_prefill_class(self, among: Collection[str]) -> str | None:
        """Whose prompts come first in a step, of classes that have any; None: no two have."""
        if len(among) < 2:
            return None
        contenders = [name for name in self.contenders if name in among]
        return min(contenders or [name for name in self._names if name in among], key=self._prefill_usage.__getitem__)

    def max_decode_gap(self, name: str) -> int | None:
        """Steps in a row in which prompts may leave out what decodes of a class, by its weight; None: as many as may.

        One at least: where a step has no room for both, each has every other.
        """
        if len(self.contenders) < 2 or name not in self.contenders:
            return None
        return max_decode_gap(self._weights[name], self._sum_of_weights())

    def num_entitled(self, name: str, by: str, blocks: Iterable[int]) -> int:
        """How many of the class's running requests, which hold so many blocks each, a higher one may not displace.

        Those that fit into what its weight gives it of places and of blocks. Of one that goes beyond it has the whole
        for a turn, which ends when it has had `turn_steps` more of it than is its due.
        """
        if name not in self.contenders:
            return 0
        total, weight = self._sum_of_weights(), self._weights[name]
        places, rest = self._num_slots * weight, self._num_blocks * weight
        count = 0
        for num_blocks in blocks:
            places, before, rest = places - total, (places, rest), rest - num_blocks * total
            if places < 0 or rest < 0:
                service = max(WHOLE // self._num_slots, WHOLE * num_blocks // self._num_blocks)
                tolerance = self._quantum_steps * service * self._scale(name)
                return count + (min(before) > 0 and self._virtual_time(name) <= self._virtual_time(by) + tolerance)
            count += 1
        return count

    def charge(
        self,
        held: Mapping[str, int],
        num_tokens: Mapping[str, int],
        blocks: Mapping[str, int],
        backlogged: Collection[str],
        unserved: Collection[str],
    ) -> None:
        """A step was formed.

        Args:
            held: Places of each class.
            num_tokens: Tokens that the step computes of each; none of those left out.
            blocks: Blocks that the requests in those places hold.
            backlogged: Classes with somebody who waits, or with a prompt to compute.
            unserved: Classes with a prompt for which the step had too few tokens.
        """
        if self._is_shared:
            self._record_service(held, num_tokens, blocks, backlogged)
        paid = {name: self._usage_after(name, held, num_tokens, blocks) for name in self.contenders}
        alone = self.contenders[0] if len(paid) == 1 else None
        if alone is not None and alone not in unserved:  # as in most steps: what follows comes down to this
            places, tokens, stored = paid[alone]
            most = max(places, tokens, stored)
            self._usage = dict.fromkeys(self._names, _NOTHING)
            self._usage[alone] = places - most, tokens - most, stored - most
            self._prefill_usage = dict.fromkeys(self._names, 0)
            return
        # Who has all it wants, or does not contend, saves up no turns either; and all have it where nobody wants more.
        wanting = [name for name in self.contenders if name in backlogged]
        passes = [max(paid[name]) for name in wanting]
        least = min(passes, default=max(map(max, paid.values()), default=0))
        for name in self._names:
            if (before := paid.get(name)) is None:
                self._usage[name] = _NOTHING
            else:
                common = min(least, max(before))
                self._usage[name] = before[0] - common, before[1] - common, before[2] - common
        # Likewise in tokens: who wanted no more is as far as the one that got least, or further, but never behind.
        lacking = [name for name in self.contenders if name in unserved]
        if not lacking:
            self._prefill_usage = dict.fromkeys(self._names, 0)
            return
        for name, count in num_tokens.items():
            self._prefill_usage[name] += WHOLE * count // self._budget * self._scale(name)
        fewest = min([self._prefill_usage[name] for name in lacking])
        for name, computed in self._prefill_usage.items():
            self._prefill_usage[name] = max(0, computed - fewest)

    def pop_usage(self) -> dict[str, ClassUsage]:
        """What each class has had since the last call, and whether it wants more."""
        paid = {}
        for name, service in self._service.items():
            turn = self._quantum_steps * WHOLE * (SCALE // self._weights[name])
            paid[name] = ClassUsage(service, turn, name in self._with_demand)
            self._service[name] = 0
        return paid

    def _record_service(
        self,
        held: Mapping[str, int],
        num_tokens: Mapping[str, int],
        blocks: Mapping[str, int],
        backlogged: Collection[str],
    ) -> None:
        for name in self._names:
            if held[name] or name in num_tokens:  # otherwise it has nothing of the step
                served = max(self._service_of_step(name, held, num_tokens, blocks))
                self._service[name] += served * (SCALE // self._weights[name])
        self._with_demand = {name for name in self.contenders if name in backlogged}

    def _effective_weight(self, name: str) -> int:
        """What of the machine it is due here, against the others."""
        return self._weights[name] if name in self.deprioritized else self._weights[name] * self._weight_divisor

    def _scale(self, name: str) -> int:
        """What it pays for service."""
        scale = SCALE // self._weights[name]
        return scale * self._weight_divisor if name in self.deprioritized else scale

    def _service_of_step(
        self, name: str, held: Mapping[str, int], num_tokens: Mapping[str, int], blocks: Mapping[str, int]
    ) -> tuple[int, int, int]:
        """What a class has of a step: parts of all places, of the budget and of all blocks, of `WHOLE` each."""
        return (
            WHOLE * held[name] // self._num_slots,
            WHOLE * num_tokens.get(name, 0) // self._budget,
            WHOLE * blocks[name] // self._num_blocks,
        )

    def _usage_after(
        self, name: str, held: Mapping[str, int], num_tokens: Mapping[str, int], blocks: Mapping[str, int]
    ) -> tuple[int, int, int]:
        """What a class has paid after a step."""
        scale = self._scale(name)
        served = self._service_of_step(name, held, num_tokens, blocks)
        places, tokens, stored = [paid + part * scale for paid, part in zip(self._usage[name], served, strict=True)]
        # What it did not need of the one may not be had for nothing much later.
        least = max(places, tokens, stored) - self._quantum_steps * WHOLE * scale
        return max(places, least), max(tokens, least), max(stored, least)

    def _virtual_time(self, name: str) -> int:
        return max(self._usage[name])

    def _sum_of_weights(self) -> int:
        return sum([self._weights[name] for name in self.contenders])


def max_decode_gap(weight: int, sum_of_weights: int) -> int:
    """Steps in a row in which others' prompts leave out what decodes of a class that contends, at most."""
    return max(1, sum_of_weights // weight - 1)
