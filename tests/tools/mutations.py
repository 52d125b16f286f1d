"""Faults of the kind that garbled text in an older server, with each guard against them switched off in turn.

    python tests/tools/mutations.py

With its guard a fault may cost time or end a request with an error, never give a wrong token; without it, the
simulation or the audit must notice. A guard that nothing would miss is not one. Below the table stands the test of each
guard, which fails when it is gone.

Here a replica is one WorkAgent. Where several compute it, a reply counts once all have given the same, to the last bit:
`tests/executor/test_tensor_parallel.py` has that guard, and that no arrays are written anew before.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from llm_serving.executor import supervisor
from llm_serving.scheduler import Scheduler
from support.simulated_client import Client
from tools.mutation_faults import (
    Patch,
    any_token_is_shown,
    block_given_twice,
    moved_untagged,
    no_copies,
    no_swaps_in,
    nobody_is_blamed,
    one_buffer_for_two_steps,
    position_kept_after_preemption,
    reply_read_early,
    results_taken_from_others,
    rows_of_lost_places_count,
    swapped_out_late,
    tokens_on_the_device_are_forgotten,
    told_of_prompts_again,
    untagged,
)
from tools.simulation import Simulation

NUM_SEEDS = 12
MOST_SEEDS = 96
"""Until somebody misses a guard: what it guards against may be rare."""


@dataclass(frozen=True)
class Mutation:
    name: str
    guard: str
    """What notices the fault."""
    fault: Patch | None
    """Brings the fault in; None if it is the lack of the guard itself."""
    unguarded: Patch
    """The fault with the guard switched off."""
    bad_luck: bool = False
    """Whether WorkAgents die, fail and are late besides."""
    of_prompts: bool = False
    """Whether clients ask for log-probabilities and the vector of their prompts besides."""
    num_machines: int = 0
    """Those on which WorkAgents run beside the master's; what can happen to machines and links does."""

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
    Mutation("a block belongs to two requests", "epoch tags of blocks", block_given_twice, untagged(block_given_twice)),
    Mutation(
        "a recomputed request skips positions",
        "fill tags of blocks",
        position_kept_after_preemption,
        untagged(position_kept_after_preemption),
    ),
    Mutation("a fork's block is not copied", "fill tags of blocks", no_copies, untagged(no_copies)),
    Mutation("a swapped block does not come back", "fill tags of blocks", no_swaps_in, untagged(no_swaps_in)),
    Mutation(
        "a block is swapped out after it was given away",
        "tags of what is moved",
        swapped_out_late,
        moved_untagged(swapped_out_late),
    ),
    Mutation(
        "blocks are named after they were lost",
        "preemption count in every row",
        None,
        rows_of_lost_places_count,
        bad_luck=True,
    ),
    Mutation(
        "a preempted request runs without its newest token",
        "count of tokens in flight",
        None,
        tokens_on_the_device_are_forgotten,
    ),
    Mutation(
        "a lost cache is taken for whole",
        "loss of the cache with its WorkAgent",
        None,
        nobody_is_blamed,
        bad_luck=True,
    ),
    Mutation(
        "a block of a prompt belongs to two requests",
        "epoch tags of blocks",
        block_given_twice,
        untagged(block_given_twice),
        of_prompts=True,
    ),
    Mutation(
        "a recomputed prompt skips positions",
        "fill tags of blocks",
        position_kept_after_preemption,
        untagged(position_kept_after_preemption),
        of_prompts=True,
    ),
    Mutation(
        "a prompt that is computed again is told of again",
        "count of the results told",
        None,
        told_of_prompts_again,
        of_prompts=True,
    ),
    Mutation(
        "a prompt is found computed and not told of",
        "results count before hits do",
        None,
        results_taken_from_others,
        of_prompts=True,
    ),
    Mutation(
        "answers of an earlier start come late",
        "token of every start",
        None,
        any_token_is_shown,
        num_machines=3,
    ),
)


@dataclass
class Verdict:
    """What became of a fault over some seeds."""

    num_garbled: int = 0
    """Requests that were told a wrong token."""
    num_lost_steps: int = 0
    """Seeds in which a step was thrown away and computed again."""
    num_audited: int = 0
    """Wrong answers that the audit found."""
    num_broken: int = 0
    """Seeds in which a law was seen to be broken, or the engine stopped with an internal error."""

    def __str__(self) -> str:
        return f"{self.num_garbled:7} {self.num_audited:7} {self.num_lost_steps:10} {self.num_broken:6}"


class Seeds:
    """Those in which requests lose their places; on the master's machine, where steps are handed over in memory. On
    others: those in which WorkAgents are started again."""

    def __init__(self, num_machines: int) -> None:
        self._num_machines = num_machines
        self._found: list[int] = []
        self._search = self._searched()

    def first(self, number: int) -> Iterator[int]:
        """Looked for when they are needed."""
        for place in range(number):
            if place == len(self._found):
                self._found.append(next(self._search))
            yield self._found[place]

    def _searched(self) -> Iterator[int]:
        wanted = "restarts" if self._num_machines else "preemptions"
        for seed in count():
            one = Simulation(seed, self._num_machines)
            one.operator.rest()
            for replica in one.replicas:
                replica.faults.rate = 0.0
            one.run()
            if one.totals.events[wanted] > 1:
                yield seed


seeds_for = cache(Seeds)


def play(
    mutation: Mutation,
    *,
    guarded: bool,
    until: Callable[[Verdict], bool] = lambda verdict: False,
    num_seeds: int = NUM_SEEDS,
) -> Verdict:
    """Plays so many seeds with the fault, or as many of them as it takes."""
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
                one = Simulation(seed, mutation.num_machines)
                one.operator.rest()
                if mutation.of_prompts:
                    ask_of_prompts(one.clients)
                _play_seed(one, verdict, bad_luck=mutation.bad_luck)
    finally:
        logging.disable(logging.NOTSET)
    return verdict


def ask_of_prompts(clients: Sequence[Client]) -> None:
    for client in clients:
        client.beam_search = None
        client.sampling = replace(client.sampling, prompt_logprobs=2)
        client.wants_vector = True


def _play_seed(one: Simulation, verdict: Verdict, *, bad_luck: bool) -> None:
    for replica in one.replicas:
        replica.faults.rate = 0.3 if bad_luck else 0.0
        replica.engine._max_steps_in_flight = 2
    with patch.object(Scheduler, "reset_cache", autospec=True, side_effect=Scheduler.reset_cache) as lose_cache:
        try:
            one.run()
        except Exception:  # noqa: BLE001  whatever it is, somebody noticed
            verdict.num_broken += 1
    verdict.num_audited += one.metrics._counts["llm_serving:audit_mismatch_total"]
    verdict.num_lost_steps += lose_cache.called
    verdict.num_garbled += sum(client.is_garbled for client in one.clients)


TEST = "test_the_guard_catches_the_fault_and_nothing_else_would"


def main() -> None:
    write = sys.stdout.write
    columns = "garbled audited lost steps broken"
    write(f"{NUM_SEEDS} seeds each; counts with the guard, then without it\n")
    write(f"{'fault':54}{'guard':36}{columns}   {columns}\n")
    for each in MUTATIONS:
        verdicts = play(each, guarded=True), play(each, guarded=False)
        write(f"{each.name:54}{each.guard:36}{verdicts[0]}   {verdicts[1]}\n")
    write("\nthe test of each guard\n")
    for each in MUTATIONS:
        write(f"tests/engine/test_mutations.py::{TEST}[{each}]\n")


if __name__ == "__main__":
    main()
