"""Weighted fair sharing among request classes, and fair sharing among the tenants of a class.

Each class is charged for its dominant resource (Ghodsi et al. 2011): the largest of its shares of running slots, of a
step's tokens and of KV blocks. The class with the lowest charge divided by weight admits the next request (stride
scheduling, Waldspurger and Weihl 1995). If several schedulers serve the same classes, a class may exceed its share
across all of them. Each scheduler then divides the weight of this class by `SchedulerLimits.weight_divisor`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.limits import SchedulerLimits

FULL_STEP: Final = 2**16
SCALE: Final = 2**23
"""Factor of all charges: charges divided by different large weights differ, and all charges fit into 63 bits."""
MAX_TENANTS: Final = 10_000
OUTPUT_TOKEN_WEIGHT: Final = 2
"""Virtual tokens of a generated token; a computed prompt token counts 1."""
_NOTHING: Final[tuple[int, ...]] = (0, 0, 0)


class ClassUsage(NamedTuple):
    """A class's use of a scheduler since the last `pop_usage`. `service`: sum of its shares of steps / its weight."""

    service: int
    quantum: int
    """Service of `quantum_steps` full steps, divided by the weight of the class."""
    has_demand: bool
    """Whether the class contended in the latest step and had a waiting request or an incomplete prompt."""


class WeightedFairSharing:
    """Decides which class admits the next request, and which slots and blocks each class is entitled to.

    Requests are admitted only from contending classes, which share slots, tokens and blocks by weight. The highest
    class with requests always contends. A lower class contends while it has waiting requests and no higher class has
    any. It also contends once one of its requests has waited `ageing_steps` for its admission or for the rest of its
    prompt. This lasts until the class holds no slot, or no higher class has requests.
    """

    def __init__(self, classes: Sequence[RequestClass], limits: SchedulerLimits, num_blocks: int) -> None:
        self._names = [each.name for each in classes]
        self._weights = {each.name: each.weight for each in classes}
        self._num_slots = limits.max_num_seqs
        self._budget = limits.max_num_batched_tokens
        self._num_blocks = num_blocks
        self._quantum_steps = limits.quantum_steps
        self.is_shared = limits.num_schedulers > 1
        self._weight_divisor = limits.weight_divisor
        self.deprioritized: frozenset[str] = frozenset()
        """Classes that exceed their share across all schedulers. Their weights are divided by `weight_divisor`."""
        self._service = dict.fromkeys(self._names, 0)
        self._with_demand: set[str] = set()
        self._usage = dict.fromkeys(self._names, _NOTHING)
        """Class -> charge for slots, tokens and blocks, divided by weight. Only differences between classes matter."""
        self._prefill_usage = dict.fromkeys(self._names, 0)
        self._aged: set[str] = set()
        self.contenders: list[str] = []

    def update_contenders(self, waiting: Collection[str], aged: Collection[str], held: Mapping[str, int]) -> None:
        """Determine the contending classes, which alone may admit requests. `waiting`: classes with a request to admit.
        `aged`: classes with a request that has waited `ageing_steps`. `held`: class -> number of running slots.
        """
        contenders: list[str] = []
        no_higher_class_waits = True
        for name in self._names:
            if name in aged:
                self._aged.add(name)
            elif not held[name]:
                self._aged.discard(name)
            if name not in waiting and not held[name]:
                continue
            if not contenders:
                self._aged.discard(name)
            if not contenders or name in self._aged or (no_higher_class_waits and name in waiting):
                contenders.append(name)
            no_higher_class_waits = no_higher_class_waits and name not in waiting
        self.contenders = contenders

    def next_class(self, waiting: Collection[str], held: Mapping[str, int], blocks: Mapping[str, int]) -> str | None:
        """Return the class of `waiting` that admits the next request, or None if none of them may admit one.

        Classes below their share of slots and blocks go first, the lowest charge before others. A class at its share
        goes before them if its charge is lower by more than a quantum, the charge for one slot in `quantum_steps`
        steps. If all classes are at their share, the highest class is next. `held`, `blocks`: class -> number of
        running slots, and of blocks.
        """
        if len(self.contenders) < 2:
            alone = self.contenders[0] if self.contenders else None
            return alone if alone in waiting else None
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
        # min returns the first, which is the highest class, if several are equal.
        name, least = (min(each, key=self._virtual_time) for each in (entitled, contenders))
        quantum = self._quantum_steps * (FULL_STEP // self._num_slots) * self._scale(name)
        return name if self._virtual_time(name) <= self._virtual_time(least) + quantum else least

    def next_prefill_class(self, among: Collection[str]) -> str | None:
        """Return the class of `among` whose prompts go first in a step, or None if `among` has fewer than two."""
        if len(among) < 2:
            return None
        contenders = [name for name in self.contenders if name in among]
        return min(contenders or [name for name in self._names if name in among], key=self._prefill_usage.__getitem__)

    def max_decode_gap(self, name: str) -> int | None:
        """Return how many consecutive steps may omit the class's decodes for prefills, or None if there is no limit."""
        if len(self.contenders) < 2 or name not in self.contenders:
            return None
        return max_decode_gap(self._weights[name], self._sum_of_weights())

    def num_entitled(self, name: str, by: str, blocks: Iterable[int]) -> int:
        """Return how many running requests of the class `name` the higher class `by` must not preempt.

        `blocks`: number of blocks of each running request of `name`. Requests count from the start of `blocks` while
        all of them together fit into the slots and blocks of the share of `name`. One more request, which fits only
        partly, counts unless the charge of `name` exceeds the charge of `by` by more than this request costs in
        `quantum_steps` steps.
        """
        if name not in self.contenders:
            return 0
        total, weight = self._sum_of_weights(), self._weights[name]
        slots_left, blocks_left = self._num_slots * weight, self._num_blocks * weight
        count = 0
        for num_blocks in blocks:
            before = slots_left, blocks_left
            slots_left, blocks_left = slots_left - total, blocks_left - num_blocks * total
            if slots_left < 0 or blocks_left < 0:
                service = max(FULL_STEP // self._num_slots, FULL_STEP * num_blocks // self._num_blocks)
                tolerance = self._quantum_steps * service * self._scale(name)
                is_protected = self._virtual_time(name) <= self._virtual_time(by) + tolerance
                return count + (min(before) > 0 and is_protected)
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
        """Charge the classes in `contenders` for a formed step: for slots, for tokens of the step, and for blocks.
        `backlogged`: classes with a waiting request or a prompt to compute. `unserved`: classes with a prompt for which
        the step had too few tokens.
        """
        # Each class's fractions of slots, token budget and blocks in this step, in units of 1 / `FULL_STEP`.
        services = {}
        for name in self._names if self.is_shared else self.contenders:
            services[name] = (
                FULL_STEP * held[name] // self._num_slots,
                FULL_STEP * num_tokens.get(name, 0) // self._budget,
                FULL_STEP * blocks[name] // self._num_blocks,
            )
        if self.is_shared:
            for name, service in services.items():
                self._service[name] += max(service) * (SCALE // self._weights[name])
            self._with_demand = {name for name in self.contenders if name in backlogged}
        usage = {}
        for name in self.contenders:
            usage[name] = self._usage_after(name, *services[name])
        if len(usage) == 1 and name not in unserved:  # most steps: the general case below reduces to this
            slots, tokens, stored = usage[name]
            most = max(slots, tokens, stored)
            self._usage = dict.fromkeys(self._names, _NOTHING)
            self._usage[name] = slots - most, tokens - most, stored - most
            self._prefill_usage = dict.fromkeys(self._names, 0)
            return
        # A class without demand, or one that does not contend, saves up no credit. Without any demand, none does.
        with_demand = [name for name in self.contenders if name in backlogged]
        times = [max(usage[name]) for name in with_demand]
        least = min(times, default=max(map(max, usage.values()), default=0))
        for name in self._names:
            if (before := usage.get(name)) is None:
                self._usage[name] = _NOTHING
            else:
                common = min(least, max(before))
                self._usage[name] = before[0] - common, before[1] - common, before[2] - common
        # The same for prefill tokens: no class has less usage than the unserved class with the least usage.
        lacking = [name for name in self.contenders if name in unserved]
        if not lacking:
            self._prefill_usage = dict.fromkeys(self._names, 0)
            return
        for name, count in num_tokens.items():
            self._prefill_usage[name] += FULL_STEP * count // self._budget * self._scale(name)
        fewest = min([self._prefill_usage[name] for name in lacking])
        for name, computed in self._prefill_usage.items():
            self._prefill_usage[name] = max(0, computed - fewest)

    def pop_usage(self) -> dict[str, ClassUsage]:
        usage = {}
        for name, service in self._service.items():
            quantum = self._quantum_steps * FULL_STEP * (SCALE // self._weights[name])
            usage[name] = ClassUsage(service, quantum, name in self._with_demand)
            self._service[name] = 0
        return usage

    def _effective_weight(self, name: str) -> int:
        return self._weights[name] if name in self.deprioritized else self._weights[name] * self._weight_divisor

    def _scale(self, name: str) -> int:
        scale = SCALE // self._weights[name]
        return scale * self._weight_divisor if name in self.deprioritized else scale

    def _usage_after(self, name: str, slots: int, tokens: int, stored: int) -> tuple[int, int, int]:
        scale = self._scale(name)
        before = self._usage[name]
        slots, tokens, stored = before[0] + slots * scale, before[1] + tokens * scale, before[2] + stored * scale
        # A resource that the class did not use earns at most a quantum of credit.
        least = max(slots, tokens, stored) - self._quantum_steps * FULL_STEP * scale
        return max(slots, least), max(tokens, least), max(stored, least)

    def _virtual_time(self, name: str) -> int:
        return max(self._usage[name])

    def _sum_of_weights(self) -> int:
        return sum([self._weights[name] for name in self.contenders])


def max_decode_gap(weight: int, sum_of_weights: int) -> int:
    """Return the maximum number of consecutive steps whose prefills may leave out the decodes of a class. A class with
    1/n of the weights decodes at least in every n-th step. The result is at least 1.
    """
    return max(1, sum_of_weights // weight - 1)


class TenantTokenCounters:
    """Virtual token counters of a class's tenants. The waiting tenant with the smallest counter goes next. Recomputed
    tokens count again. Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._floor = 0
        self._last_to_leave: str | None = None

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, self._floor)

    def charge(self, tenant: str, num_tokens: int) -> None:
        served = self._served  # no method call: one step may charge the service of many replicas
        served[tenant] = served.get(tenant, self._floor) + num_tokens
        if len(served) > MAX_TENANTS:
            self._evict()

    def join(self, tenant: str, least_waiting: int | None) -> None:
        """Record that a tenant begins to wait. Its counter rises at least to `least_waiting`, the smallest counter of
        the tenants that wait already, so that idle time gives it no advantage. If no tenant waits (None), the counter
        of the tenant that stopped waiting last is used.
        """
        if least_waiting is None and self._last_to_leave is not None:
            least_waiting = self.served(self._last_to_leave)
        self._floor = max(self._floor, least_waiting or 0)
        self._served[tenant] = max(self.served(tenant), self._floor)
        if len(self._served) > MAX_TENANTS:
            self._evict()

    def leave(self, tenant: str) -> None:
        self._last_to_leave = tenant

    def _evict(self) -> None:
        most_last = sorted(self._served, key=self._served.__getitem__)
        kept = most_last[-(MAX_TENANTS // 2) :]
        self._served = {name: self._served[name] for name in kept if self._served[name] > self._floor}
