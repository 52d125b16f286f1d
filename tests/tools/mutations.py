"""Inject faults that would garble text, and switch off each guard against them in turn.

    python tests/tools/mutations.py

With its guard a fault may cost time or end a request with an error, but never gives a wrong token. Without the guard
the simulation or the audit must detect the fault; otherwise the guard would be useless. Below the table the tool prints
the test of each guard, which fails if the guard is removed.

Here each replica is one WorkAgent. If several ranks compute a replica, a reply counts once all ranks have sent
bit-identical results. `tests/executor/test_tensor_parallel.py` tests that guard, and that arrays are not overwritten
before.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from llm_serving.executor import supervisor
from llm_serving.scheduler import Scheduler
from support.simulated_client import Client
from support.simulated_settings import GROUPS, draw_scheduler
from tools import simulation
from tools.mutation_faults import (
    Patch,
    block_allocated_twice,
    block_freed_too_early,
    cache_not_reset,
    hit_without_window,
    moved_untagged,
    no_copies,
    no_swaps_in,
    one_buffer_for_two_steps,
    position_kept_after_preemption,
    preempted_rows_confirmed,
    prompt_results_repeated,
    prompt_results_skipped,
    reply_read_early,
    start_token_ignored,
    swapped_out_late,
    tokens_in_flight_forgotten,
    untagged,
)
from tools.simulation import Simulation

NUM_SEEDS = 8
MAX_SEEDS = 96
"""Maximum number of seeds until a missing guard must be detected, because its fault may be rare."""


@dataclass(frozen=True)
class Mutation:
    name: str
    guard: str
    """What detects the fault."""
    fault: Patch | None
    """Injects the fault; None if the fault is the missing guard itself."""
    unguarded: Patch
    """Injects the fault and switches off the guard."""
    with_faults: bool = False
    """Whether WorkAgents also die, fail and are late."""
    with_prompt_results: bool = False
    """Whether clients also request prompt logprobs and vectors."""
    with_groups: bool = False
    """Whether the models have groups of layers with windows, and all requests may share prefixes."""
    num_machines: int = 0
    """Machines with WorkAgents beside the master's, which may fail, as may the links to them."""

    def __str__(self) -> str:
        return f"{self.name}: {self.guard}"


MUTATIONS = (
    Mutation(
        "a reply is read one step early",
        "step number in every reply",
        lambda: reply_read_early(numbered=True),
        lambda: reply_read_early(numbered=False),
    ),
    Mutation(
        "a buffer is written before it was read",
        "owner of every buffer",
        lambda: one_buffer_for_two_steps(owned=True, numbered=False),
        lambda: one_buffer_for_two_steps(owned=False, numbered=False),
    ),
    Mutation(
        "a buffer is written before it was read",
        "step number among the arrays",
        lambda: one_buffer_for_two_steps(owned=False, numbered=True),
        lambda: one_buffer_for_two_steps(owned=False, numbered=False),
    ),
    Mutation(
        "a block belongs to two requests",
        "epoch tags of blocks",
        block_allocated_twice,
        untagged(block_allocated_twice),
    ),
    Mutation(
        "a recomputed request skips positions",
        "fill tags of blocks",
        position_kept_after_preemption,
        untagged(position_kept_after_preemption),
    ),
    Mutation(
        "a prefix hit lacks the blocks of a window",
        "epoch tags of blocks",
        hit_without_window,
        untagged(hit_without_window),
        with_groups=True,
    ),
    Mutation(
        "a block is freed before its window has passed",
        "epoch tags of blocks",
        block_freed_too_early,
        untagged(block_freed_too_early),
        with_groups=True,
    ),
    Mutation("a fork's block is not copied", "fill tags of blocks", no_copies, untagged(no_copies)),
    Mutation("a swapped block is not swapped in", "fill tags of blocks", no_swaps_in, untagged(no_swaps_in)),
    Mutation(
        "a block is swapped out after its reallocation",
        "source tags of moves",
        swapped_out_late,
        moved_untagged(swapped_out_late),
    ),
    Mutation(
        "a step uses blocks of a preempted request",
        "preemption count in every row",
        None,
        preempted_rows_confirmed,
        with_faults=True,
    ),
    Mutation(
        "a preempted request runs without its newest token",
        "count of tokens in flight",
        None,
        tokens_in_flight_forgotten,
    ),
    Mutation(
        "a lost cache is treated as present",
        "cache reset after a WorkAgent's death",
        None,
        cache_not_reset,
        with_faults=True,
    ),
    Mutation(
        "a block of a prompt belongs to two requests",
        "epoch tags of blocks",
        block_allocated_twice,
        untagged(block_allocated_twice),
        with_prompt_results=True,
    ),
    Mutation(
        "a recomputed prompt skips positions",
        "fill tags of blocks",
        position_kept_after_preemption,
        untagged(position_kept_after_preemption),
        with_prompt_results=True,
    ),
    Mutation(
        "results of a recomputed prompt are repeated",
        "count of the results received",
        None,
        prompt_results_repeated,
        with_prompt_results=True,
    ),
    Mutation(
        "a prefix hit skips prompt results",
        "results needed limit prefix hits",
        None,
        prompt_results_skipped,
        with_prompt_results=True,
    ),
    Mutation(
        "answers of an earlier start come late",
        "token of every start",
        None,
        start_token_ignored,
        num_machines=3,
    ),
)


@dataclass
class Verdict:
    """The effects of a fault over some seeds."""

    num_garbled: int = 0
    """Requests that received a wrong token."""
    num_lost_steps: int = 0
    """Seeds in which a step was discarded and computed again."""
    num_audited: int = 0
    """Wrong answers that the audit found."""
    num_broken: int = 0
    """Seeds in which an invariant was broken, or the engine stopped with an internal error."""

    def __str__(self) -> str:
        return f"{self.num_garbled:7} {self.num_audited:7} {self.num_lost_steps:10} {self.num_broken:6}"


class Seeds:
    """Seeds with preemptions if WorkAgents run on the master's machine, else seeds with restarts.

    On the master's machine steps are sent in shared memory.
    """

    def __init__(self, num_machines: int) -> None:
        self._num_machines = num_machines
        self._found: list[int] = []
        self._search = self._search_seeds()

    def first(self, number: int) -> Iterator[int]:
        """Yield the first seeds, searching for further ones when they are needed."""
        for index in range(number):
            if index == len(self._found):
                self._found.append(next(self._search))
            yield self._found[index]

    def _search_seeds(self) -> Iterator[int]:
        event = "restarts" if self._num_machines else "preemptions"
        for seed in count():
            one = Simulation(seed, self._num_machines)
            one.operator.disable()
            for replica in one.replicas:
                replica.faults.rate = 0.0
            with patch.object(Scheduler, "check_integrity", lambda self: None):  # as in `play`
                one.run()
            if one.totals.events[event] > 1:
                yield seed


seeds_for = cache(Seeds)


def play(
    mutation: Mutation,
    *,
    guarded: bool,
    until: Callable[[Verdict], bool] = lambda verdict: False,
    num_seeds: int = NUM_SEEDS,
) -> Verdict:
    """Run up to `num_seeds` seeds with the fault, until `until` holds."""
    verdict = Verdict()
    fault = mutation.fault if guarded else mutation.unguarded
    logging.disable(logging.CRITICAL)
    try:
        for seed in seeds_for(mutation.num_machines).first(num_seeds):
            if until(verdict):
                break
            with ExitStack() as stack:
                stack.enter_context(nullcontext() if fault is None else fault())
                stack.enter_context(patch.object(Scheduler, "check_integrity", lambda self: None))
                stack.enter_context(patch.object(supervisor, "FIRST_DELAY_S", 0.0))
                if mutation.with_groups:
                    stack.enter_context(patch.object(simulation, "draw_scheduler", draw_scheduler_with_groups))
                one = Simulation(seed, mutation.num_machines)
                one.operator.disable()
                if mutation.with_prompt_results:
                    request_prompt_results(one.clients)
                _play_seed(one, verdict, with_faults=mutation.with_faults)
    finally:
        logging.disable(logging.NOTSET)
    return verdict


def draw_scheduler_with_groups(rng: random.Random) -> dict[str, Any]:
    options = draw_scheduler(rng) | {"window": None, "num_spare_states": None, "prefix_caching": True}
    windows = random.Random(repr(options["num_blocks"])).choice(GROUPS)
    return options | {"windows": windows, "num_blocks": 15 * len(windows)}


def request_prompt_results(clients: Sequence[Client]) -> None:
    for client in clients:
        client.beam_search = None
        client.sampling = replace(client.sampling, prompt_logprobs=2)
        client.wants_vector = True


def _play_seed(one: Simulation, verdict: Verdict, *, with_faults: bool) -> None:
    for replica in one.replicas:
        replica.faults.rate = 0.3 if with_faults else 0.0
        replica.engine._max_steps_in_flight = 2
    with patch.object(Scheduler, "reset_cache", autospec=True, side_effect=Scheduler.reset_cache) as lose_cache:
        try:
            one.run()
        except Exception:  # noqa: BLE001  any error means that the fault was detected
            verdict.num_broken += 1
    verdict.num_audited += one.metrics._counts["llm_serving:audit_mismatch_total"]
    verdict.num_lost_steps += lose_cache.called
    verdict.num_garbled += sum(client.is_garbled for client in one.clients)


TEST = "test_guard_catches_the_injected_fault"


def main() -> None:
    write = sys.stdout.write
    columns = "garbled audited lost steps broken"
    write(f"{NUM_SEEDS} seeds each; counts with the guard, then without it\n")
    write(f"{'fault':54}{'guard':36}{columns}   {columns}\n")
    for each in MUTATIONS:
        verdicts = play(each, guarded=True), play(each, guarded=False)
        write(f"{each.name:54}{each.guard:36}{verdicts[0]}   {verdicts[1]}\n")
    write("\ntest of each guard\n")
    for each in MUTATIONS:
        write(f"tests/engine/test_mutations.py::{TEST}[{each}]\n")


if __name__ == "__main__":
    main()
