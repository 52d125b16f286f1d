"""An operator who lets replicas leave and join at random rounds of the simulation."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

from llm_serving.engine.control import Control
from llm_serving.engine.replicas import Replicas
from llm_serving.errors import RequestError

SEEDS_WITH_ONE = 0.5
ROUNDS_BETWEEN = (0, 1, 1, 2, 5, 20)
"""Rounds between two actions, often so few that a replica must join before it has left."""


class Operator:
    """Drains and joins replicas through the shipping `Control`, in half of the seeds."""

    def __init__(self, rng: random.Random, control: Control, replicas: Replicas, num_replicas: int) -> None:
        self.counts: Counter[str] = Counter()
        self._rng, self._control, self._replicas, self._num_replicas = rng, control, replicas, num_replicas
        num_times = rng.randint(1, 12) if rng.random() < SEEDS_WITH_ONE else 0
        between = [rng.randint(0, 30), *(rng.choice(ROUNDS_BETWEEN) for _ in range(num_times))][:num_times]
        self._rounds = deque(itertools.accumulate(between))
        self._index = 0

    def act(self, now: int) -> None:
        """Do the actions that are due in round `now`."""
        while self._rounds and self._rounds[0] <= now:
            self._rounds.popleft()
            if self._rng.random() < 0.5:  # otherwise the replica of the action before
                self._index = self._rng.randrange(self._num_replicas)
            self._ask(self._index)

    def disable(self) -> None:
        """Do nothing in later rounds."""
        self._rounds.clear()

    def _ask(self, index: int) -> None:
        if self._replicas.is_drained(index):
            self._control.join(index)
            self.counts["joins"] += 1
            return
        states = {each: self._replicas.state(each) for each in range(self._num_replicas)}
        has_others = any(state in ("serving", "restarting") for each, state in states.items() if each != index)
        if states[index] == "serving":
            has_others = "serving" in [state for each, state in states.items() if each != index]
        has_requests = bool(self._control.replica_views()[index].num_unfinished)
        try:
            self._control.drain(index)
        except RequestError:
            assert not has_others, "a drain was refused although another replica serves"
            self.counts["drains refused"] += 1
        else:
            assert has_others, "the last serving replica was drained"
            self.counts["drains"] += 1
            self.counts["drains with requests"] += has_requests
