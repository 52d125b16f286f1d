"""Clients that lie, and a search for the worst they can do to one honest request.

The victim comes to a scheduler that liars keep full. They choose class, priority, tenant, the length of prompts and
answers, how many of them wait and in which steps they come. What they choose is a strategy of a few numbers, which the
search improves by hill climbing, from the worst that reading the code suggests. The longest wait of the victim is set
beside the bound that it was promised on its arrival.

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
"""Tokens a request may have."""
MANY = 60
"""Requests that wait so long that the oldest of them have always aged."""
MAX_STEPS = 100_000
SPREAD = 900
"""Priorities of a class that liars choose from."""
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
"""Schedulers that are attacked; what is not named is `create_attacked`'s."""


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
class Liar:
    """Asks for the same again and again, so that always some of its requests wait."""

    rank: int
    """Of its class."""
    last_first: bool
    """Whether each of its requests has a better priority than the one before it."""
    num_prompt_tokens: int
    max_tokens: int
    new_tenants: bool
    """A name of its own for each request."""
    num_waiting: int


@dataclass(frozen=True)
class Strategy:
    """What all of them do together."""

    liars: tuple[Liar, ...]
    warmup_steps: int
    """Before the victim comes."""
    burst_steps: int
    """Between two moments in which they come."""
    victim_tokens: tuple[int, int] = (1, LONGEST - 1)
    """Of its prompt and of its answer: where the order goes by length, short ones are overtaken by few."""


class Attack:
    """One strategy, played to the end of the victim."""

    def __init__(self, scheduler: Scheduler, strategy: Strategy, victim_class: RequestClass) -> None:
        self._scheduler = scheduler
        self._strategy = strategy
        self._victim_class = victim_class
        self._waiting: list[list[Request]] = [[] for _ in strategy.liars]
        self._num_sent = 0
        if scheduler.limits.num_schedulers > 1:  # others of its class have another replica to themselves
            scheduler.deprioritize([victim_class.name])
        self.prompt_gap = self.longest_prompt_gap = 0
        """Steps in a row that left out the victim's prompt when it had a place."""

    def run(self) -> tuple[int, int]:
        """(steps the victim waited, steps it was promised)."""
        for step in range(self._strategy.warmup_steps):
            self._step(step)
        self._fill()
        num_tokens, max_tokens = self._strategy.victim_tokens
        priority = self._victim_class.rank + SPREAD
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
            assert schedule.num_bound_violations == 0, f"a bound is broken by {self._strategy}"
            self._scheduler.update(schedule, [7] * sum(row.num_samples for row in schedule.rows))

    def _fill(self) -> None:
        for liar, waiting in zip(self._strategy.liars, self._waiting, strict=True):
            waiting[:] = [each for each in waiting if each.status is RequestStatus.WAITING]
            while len(waiting) < liar.num_waiting:
                self._num_sent += 1
                better = self._num_sent % SPREAD if liar.last_first else 0
                request = create_request(
                    liar.num_prompt_tokens,
                    max_tokens=liar.max_tokens,
                    priority=liar.rank + SPREAD - better,
                    tenant=str(self._num_sent) if liar.new_tenants else "liar",
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
"""Tokens of prompts and answers that others send: whole prompts, one token; full blocks; half of each; long answers."""


@dataclass(frozen=True)
class Move:
    """Liars of the victim's own class, which go first as often as may be, and others that never stop contending."""

    own: tuple[int, int]
    """Tokens of their prompts and answers."""
    others: tuple[tuple[int, int], ...] = ()
    """The same for each other class, by rank."""
    num_others: int = MANY
    """That wait, of each class."""

    def strategy(self, classes: tuple[RequestClass, ...], victim: RequestClass) -> Strategy:
        ranks = [each.rank for each in classes if each is not victim]
        others = [
            Liar(rank, False, *shape, False, self.num_others) for rank, shape in zip(ranks, self.others, strict=True)
        ]
        return Strategy((Liar(victim.rank, True, *self.own, True, 12), *others), 150, 1)


def moves(classes: tuple[RequestClass, ...], victim: RequestClass) -> list[Strategy]:
    """What the derivation of the bounds reckons with, one move for each of its terms.

    Own requests that go first as often as the order allows and take a place for as long as they can; other classes that
    never stop contending, since always some of theirs have aged, and that fill the places, the steps (whole prompts,
    one token) or the cache (long answers that lose their places and are computed again).
    """
    owns = ((1, LONGEST - 1), (LONGEST // 2, LONGEST // 2), (LONGEST - 1, 1))
    found = [
        Move(own, (shape,) * (len(classes) - 1), num_others).strategy(classes, victim)
        for own, shape, num_others in itertools.product(owns, SHAPES, (MANY, 6))
    ]
    return list(dict.fromkeys(found))


def draw_liar(rng: random.Random, classes: tuple[RequestClass, ...]) -> Liar:
    num_prompt_tokens = rng.choice((1, 4, LONGEST // 2, 3 * LONGEST // 4, LONGEST - 1))
    return Liar(
        rank=rng.choice(classes).rank,
        last_first=rng.random() < 0.5,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=rng.choice((1, 4, LONGEST - num_prompt_tokens, LONGEST - num_prompt_tokens)),
        new_tenants=rng.random() < 0.5,
        num_waiting=rng.choice((1, 4, 12, MANY)),
    )


def changed(rng: random.Random, strategy: Strategy, classes: tuple[RequestClass, ...]) -> Strategy:
    """A neighbour of a strategy."""
    liars, place = list(strategy.liars), rng.randrange(len(strategy.liars))
    match rng.randint(0, 5):
        case 0:
            liars[place] = draw_liar(rng, classes)
        case 1 if len(liars) < 5:
            liars.append(draw_liar(rng, classes))
        case 2 if len(liars) > 1:
            del liars[place]
        case 3:
            return replace(strategy, warmup_steps=rng.choice((0, 10, 40, 100, 200)))
        case 4 if rng.random() < 0.5:
            return replace(strategy, victim_tokens=rng.choice(((1, LONGEST - 1), (4, 4), (LONGEST - 1, 1))))
        case 4:
            return replace(strategy, burst_steps=rng.choice((1, 2, 5, 20)))
        case _:
            liars[place] = replace(liars[place], num_waiting=rng.choice((0, 1, 4, 12, MANY)))
    return replace(strategy, liars=tuple(liars))


@dataclass
class Worst:
    """The worst that was found for one class."""

    waited: int
    bound: int
    strategy: Strategy

    @property
    def ratio(self) -> float:
        """Of the bound to the wait; 1 is as tight as can be."""
        return self.bound / max(1, self.waited)


def search(options: dict[str, Any], victim: RequestClass, num_rounds: int, seed: int) -> Worst:
    """The worst of `num_rounds` strategies against a victim of a class, measured by what it was promised."""
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
    parser.add_argument("--rounds", type=int, default=100, help="strategies tried for each class (default: 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="only this scheduler; may come again")
    parser.add_argument("--show", action="store_true", help="print the worst strategy of each")
    args = parser.parse_args()
    write = sys.stdout.write
    write("| scheduler | class | worst wait met, steps | its bound, steps | ratio |\n| --- | --- | --- | --- | --- |\n")
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
