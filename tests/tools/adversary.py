"""Search for the clients that delay one honest request most, and compare its wait with its bound.

The victim is a request that arrives at a scheduler kept full by hostile clients. These choose class, priority, tenant,
the lengths of prompts and answers, how many of their requests wait, and the steps in which they send new ones. Such a
choice is a strategy. The search improves strategies by hill climbing, starting from the worst ones that reading the
scheduler's code suggests. The longest wait of the victim is compared with the bound that the scheduler gave it on
arrival.

    python tests/tools/adversary.py --rounds 200
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from llm_serving.core.request import Request, RequestStatus
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler import Scheduler
from support.factories import create_request, create_scheduler

LONGEST = 16
"""Maximum number of tokens of a request."""
MANY = 60
"""Number of waiting requests at which the oldest has always reached its ageing limit."""
MAX_STEPS = 100_000
NUM_PRIORITIES = 900
"""Number of priorities of a class that hostile clients choose from."""
CLASSES = (
    RequestClass(name="interactive", rank=-1000, weight=4, ageing_steps=16),
    RequestClass(name="standard", rank=0, weight=2, ageing_steps=32),
    RequestClass(name="batch", rank=1000, weight=1, ageing_steps=64),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "one class, 1 slot": {"classes": CLASSES[1:2], "max_num_seqs": 1},
    "one class, 4 slots": {"classes": CLASSES[1:2], "max_num_seqs": 4},
    "three classes, 1 slot": {"classes": CLASSES, "max_num_seqs": 1},
    "three classes, 4 slots": {"classes": CLASSES, "max_num_seqs": 4},
    "three classes, 8 slots": {"classes": CLASSES, "max_num_seqs": 8},
    "three classes, 8 slots, small cache": {"classes": CLASSES, "max_num_seqs": 8, "num_blocks": 20},
    "three classes, 8 slots, long decode gap": {"classes": CLASSES, "max_num_seqs": 8, "max_decode_gap": 64},
    "three classes, 4 slots, one of 2 replicas": {"classes": CLASSES, "max_num_seqs": 4, "num_schedulers": 2},
    "three classes, 4 slots, one of 3 replicas": {"classes": CLASSES, "max_num_seqs": 4, "num_schedulers": 3},
    "three classes, 4 slots, one of 4 replicas": {"classes": CLASSES, "max_num_seqs": 4, "num_schedulers": 4},
    "mixed, three classes, 4 slots": {"classes": CLASSES, "max_num_seqs": 4, "policy": "mixed"},
    "shortest, three classes, 4 slots": {"classes": CLASSES, "max_num_seqs": 4, "order": "shortest"},
}
"""Options of the attacked schedulers; `create_attacked` has the other options."""


def create_attacked(**options: Any) -> Scheduler:
    defaults = {
        "num_blocks": 100,
        "block_size": 4,
        "max_num_batched_tokens": 32,
        "max_prefill_seqs": 16,
        "max_model_len": LONGEST,
        "max_decode_gap": 4,
        "max_prefill_gap": 16,
        "max_overtakes": 3,
        "max_preemptions": 2,
        "quantum_steps": 8,
        "max_head_start_steps": 10**6,
    }
    return create_scheduler(**{**defaults, **options})


@dataclass(frozen=True)
class HostileClient:
    """A client that sends the same request repeatedly, so that some of its requests always wait."""

    rank: int
    last_first: bool
    """Whether each of its requests has a better priority than the one before it."""
    num_prompt_tokens: int
    max_tokens: int
    new_tenants: bool
    """Whether each of its requests has a tenant of its own."""
    num_waiting: int


@dataclass(frozen=True)
class Strategy:
    """The choices of all hostile clients."""

    clients: tuple[HostileClient, ...]
    warmup_steps: int
    """Steps before the victim arrives."""
    burst_steps: int
    """Steps between two arrivals of hostile requests."""
    victim_tokens: tuple[int, int] = (1, LONGEST - 1)
    """Tokens of the victim's prompt and answer. If the order depends on length, few requests bypass a short one."""


class Attack:
    """One strategy, run until the victim has finished."""

    def __init__(self, scheduler: Scheduler, strategy: Strategy, victim_class: RequestClass) -> None:
        self._scheduler = scheduler
        self._strategy = strategy
        self._victim_class = victim_class
        self._waiting: list[list[Request]] = [[] for _ in strategy.clients]
        self._num_sent = 0
        if scheduler.limits.num_schedulers > 1:  # other requests of the victim's class have a replica of their own
            scheduler.deprioritize([victim_class.name])
        self.prompt_gap = self.longest_prompt_gap = 0
        """Consecutive steps without tokens of the victim's prompt while the victim had a running slot."""

    def run(self) -> tuple[int, int]:
        """Return (steps the victim waited, its bound in steps)."""
        for step in range(self._strategy.warmup_steps):
            self._step(step)
        self._fill()
        num_tokens, max_tokens = self._strategy.victim_tokens
        priority = self._victim_class.rank + NUM_PRIORITIES
        victim = create_request(num_tokens, max_tokens=max_tokens, priority=priority, tenant="victim")
        self._scheduler.add(victim)
        assert victim.request_class is self._victim_class and victim.wait_bound is not None
        for step in range(MAX_STEPS):
            if victim.is_finished:
                break
            before = victim.num_computed_tokens
            is_prompt = victim.status is RequestStatus.RUNNING and victim.num_uncomputed_tokens > 1
            self._step(step)
            is_left_out = is_prompt and victim.num_computed_tokens == before
            self.prompt_gap = self.prompt_gap + 1 if is_left_out else 0
            self.longest_prompt_gap = max(self.longest_prompt_gap, self.prompt_gap)
        assert victim.num_steps_waited is not None
        return victim.num_steps_waited, victim.wait_bound

    def _step(self, step: int) -> None:
        if step % self._strategy.burst_steps == 0:
            self._fill()
        schedule = self._scheduler.schedule(0.0)
        if schedule is not None:
            assert schedule.num_bound_violations == 0, f"a bound is exceeded with {self._strategy}"
            self._scheduler.update(schedule, [7] * sum(row.num_samples for row in schedule.rows))

    def _fill(self) -> None:
        for client, waiting in zip(self._strategy.clients, self._waiting, strict=True):
            waiting[:] = [each for each in waiting if each.status is RequestStatus.WAITING]
            while len(waiting) < client.num_waiting:
                self._num_sent += 1
                better = self._num_sent % NUM_PRIORITIES if client.last_first else 0
                request = create_request(
                    client.num_prompt_tokens,
                    max_tokens=client.max_tokens,
                    priority=client.rank + NUM_PRIORITIES - better,
                    tenant=str(self._num_sent) if client.new_tenants else "hostile",
                )
                self._scheduler.add(request)
                waiting.append(request)


SHAPES = (
    (LONGEST - 1, 1),
    (3 * LONGEST // 4, 1),
    (LONGEST // 2, 1),
    (LONGEST // 2, LONGEST // 2),
    (1, LONGEST - 1),
)
"""Prompt and answer tokens of other classes: whole prompts, one token; full blocks; half of each; long answers."""


@dataclass(frozen=True)
class Move:
    """Hostile clients of the victim's class with the best priorities, and of other classes that always have requests
    waiting.
    """

    own: tuple[int, int]
    """Prompt and answer tokens of the victim's class."""
    others: tuple[tuple[int, int], ...] = ()
    """Prompt and answer tokens of each other class, by rank."""
    num_others: int = MANY
    """Waiting requests of each other class."""

    def strategy(self, classes: tuple[RequestClass, ...], victim: RequestClass) -> Strategy:
        ranks = [each.rank for each in classes if each is not victim]
        others = [
            HostileClient(rank, False, *shape, False, self.num_others)
            for rank, shape in zip(ranks, self.others, strict=True)
        ]
        return Strategy((HostileClient(victim.rank, True, *self.own, True, 12), *others), 150, 1)


def moves(classes: tuple[RequestClass, ...], victim: RequestClass) -> list[Strategy]:
    """Return one strategy for each term of the derivation of the bounds.

    Requests of the victim's class run first as often as the order allows, and keep a running slot as long as possible.
    Some requests of the other classes have always aged. They fill the running slots, the steps (whole prompts, one
    token) or the KV cache (long answers that are preempted and recomputed).
    """
    owns = ((1, LONGEST - 1), (LONGEST // 2, LONGEST // 2), (LONGEST - 1, 1))
    found = [
        Move(own, (shape,) * (len(classes) - 1), num_others).strategy(classes, victim)
        for own, shape, num_others in itertools.product(owns, SHAPES, (MANY, 6))
    ]
    return list(dict.fromkeys(found))


def draw_client(rng: random.Random, classes: tuple[RequestClass, ...]) -> HostileClient:
    num_prompt_tokens = rng.choice((1, 4, LONGEST // 2, 3 * LONGEST // 4, LONGEST - 1))
    return HostileClient(
        rank=rng.choice(classes).rank,
        last_first=rng.random() < 0.5,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=rng.choice((1, 4, LONGEST - num_prompt_tokens, LONGEST - num_prompt_tokens)),
        new_tenants=rng.random() < 0.5,
        num_waiting=rng.choice((1, 4, 12, MANY)),
    )


def changed(rng: random.Random, strategy: Strategy, classes: tuple[RequestClass, ...]) -> Strategy:
    """Return a neighbour of a strategy."""
    clients, index = list(strategy.clients), rng.randrange(len(strategy.clients))
    match rng.randint(0, 5):
        case 0:
            clients[index] = draw_client(rng, classes)
        case 1 if len(clients) < 5:
            clients.append(draw_client(rng, classes))
        case 2 if len(clients) > 1:
            del clients[index]
        case 3:
            return replace(strategy, warmup_steps=rng.choice((0, 10, 40, 100, 200)))
        case 4 if rng.random() < 0.5:
            return replace(strategy, victim_tokens=rng.choice(((1, LONGEST - 1), (4, 4), (LONGEST - 1, 1))))
        case 4:
            return replace(strategy, burst_steps=rng.choice((1, 2, 5, 20)))
        case _:
            clients[index] = replace(clients[index], num_waiting=rng.choice((0, 1, 4, 12, MANY)))
    return replace(strategy, clients=tuple(clients))


@dataclass
class Worst:
    """The worst strategy found for a victim's class."""

    waited: int
    bound: int
    strategy: Strategy

    @property
    def ratio(self) -> float:
        """Ratio of the bound to the wait; at 1 the bound is tight."""
        return self.bound / max(1, self.waited)


def search(options: dict[str, Any], victim: RequestClass, num_rounds: int, seed: int) -> Worst:
    """Try `num_rounds` strategies against a victim of a class; return the one with the smallest ratio."""
    rng = random.Random(f"{seed} {victim.name}")
    classes, worst = options["classes"], None
    for strategy in moves(classes, victim):
        found = Worst(*Attack(create_attacked(**options), strategy, victim).run(), strategy)
        if worst is None or found.ratio < worst.ratio:
            worst = found
    assert worst is not None
    for _ in range(num_rounds):
        strategy = changed(rng, worst.strategy, classes)
        found = Worst(*Attack(create_attacked(**options), strategy, victim).run(), strategy)
        if found.ratio <= worst.ratio:
            worst = found
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="strategies to try for each class (default: 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--setting", action="append", choices=SETTINGS, help="only this scheduler; may be given several times"
    )
    parser.add_argument("--show", action="store_true", help="print the worst strategy of each")
    args = parser.parse_args()
    write = sys.stdout.write
    write("| scheduler | class | longest wait, steps | its bound, steps | ratio |\n| --- | --- | --- | --- | --- |\n")
    for name in args.setting or SETTINGS:
        options = SETTINGS[name]
        for victim in options["classes"]:
            worst = search(options, victim, args.rounds, args.seed)
            write(f"| {name} | {victim.name} | {worst.waited} | {worst.bound} | {worst.ratio:.1f} |\n")
            if args.show:
                write(f"{worst.strategy}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
