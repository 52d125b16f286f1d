"""Faults of the kind that garbled text in an older server, with each guard against them switched off in turn.

    python tests/mutations.py

With its guard a fault may cost time or end a request with an error, never give a wrong token; without it, the
simulation or the audit must notice. A guard that nothing would miss is not one. Below the table stands the test of each
guard, which fails when it is gone.

Here a replica is one WorkAgent. Where several compute it, a reply counts once all have given the same, to the last bit:
`tests/executor/test_ranks.py` has that guard, and that no arrays are written anew before.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import msgspec
import simulated_agent
from llm_serving.core.request import Request
from llm_serving.core.step import BlockMove, Move
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.executor import executor as executor_module
from llm_serving.executor import supervised_executor
from llm_serving.executor.arrivals import Arrivals
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.kvcache.block_manager import BlockManager
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.scheduler import Scheduler
from llm_serving.scheduler import scheduler as scheduler_module
from llm_serving.scheduler.giving_way import GivingWay
from llm_serving.scheduler.prompt_results import prompt_results_of
from llm_serving.scheduler.schedule import PromptResults, ScheduledRow
from llm_serving.transport.messages import StepDone
from llm_serving.worker.block_guard import BlockGuard
from simulated_agent import SimulatedAgent
from simulated_client import Client
from simulation import Simulation

Patch = Callable[[], Any]
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


# --- faults -----------------------------------------------------------------------------------------------------------


def reply_read_early(*, numbered: bool) -> Any:
    """Now and then the master reads the reply to the step before once more, in place of the one it waits for."""
    receive = SimulatedAgent.receive
    state: dict[int, tuple[Any, int]] = {}

    def receive_early(agent: SimulatedAgent, timeout_s: float | None = None) -> Any:
        reply = receive(agent, timeout_s)
        before, count = state.get(id(agent), (None, 0))
        state[id(agent)] = reply, count + 1
        if count % 7 != 5 or not isinstance(before, StepDone) or not isinstance(reply, StepDone):
            return reply
        return before if numbered else msgspec.structs.replace(before, step=reply.step)

    return patch.object(SimulatedAgent, "receive", receive_early)


@contextmanager
def one_buffer_for_two_steps(*, owned: bool, numbered: bool) -> Iterator[None]:
    """Every step is written to the same buffer, whether or not the one before it has been read."""
    start = RemoteExecutor.__init__

    def start_with_one(self: RemoteExecutor, channel: Any, buffers: Any, *others: Any) -> None:
        start(self, channel, buffers, *others)
        buffers.num_buffers = 1

    from_arrays = simulated_agent.step_from_arrays

    def unnumbered(step: int, arrays: list[Any], *others: Any) -> Any:
        arrays[0] = arrays[0] * 0 + step
        return from_arrays(step, arrays, *others)

    with ExitStack() as stack:
        stack.enter_context(patch.object(RemoteExecutor, "__init__", start_with_one))
        if not owned:
            stack.enter_context(patch.object(executor_module, "_owners_of", lambda buffer, in_flight: []))
        if not numbered:
            stack.enter_context(patch.object(simulated_agent, "step_from_arrays", unnumbered))
        yield


def block_given_twice() -> Any:
    """Now and then a block is handed out that somebody holds already."""
    allocate = BlockPool.allocate
    state = {"count": 0}

    def allocate_twice(pool: BlockPool, count: int) -> list[int]:
        block_ids = allocate(pool, count)
        state["count"] += 1
        held = [
            block_id for block_id in range(pool.num_blocks) if pool.ref_count(block_id) and block_id not in block_ids
        ]
        if state["count"] % 6 == 5 and held and block_ids:
            pool.free([block_ids.pop()])
            pool.reference([held[0]])
            pool._epochs[held[0]] = pool._num_allocations
            if (name := pool._names[held[0]]) is not None:
                del pool._blocks_by_name[name]
                pool._names[held[0]] = None
            block_ids.append(held[0])
        return block_ids

    return patch.object(BlockPool, "allocate", allocate_twice)


def position_kept_after_preemption() -> Any:
    """A preempted request believes that what it had computed is still there."""
    preempt = GivingWay.preempt

    def preempt_badly(self: GivingWay, request: Any, *rest: Any) -> None:
        before = request.num_computed_tokens
        preempt(self, request, *rest)
        if not self._blocks.is_swapped(request.request_id):
            request.num_computed_tokens = before

    return patch.object(GivingWay, "preempt", preempt_badly)


def no_copies() -> Any:
    return moves_left_out(BlockMove.COPY)


def no_swaps_in() -> Any:
    return moves_left_out(BlockMove.SWAP_IN)


def swapped_out_late() -> Any:
    """A block goes to the host pool one step after the one that gave it to somebody else."""
    take = BlockManager.take_moves
    kept: dict[int, list[Move]] = {}

    def take_late(self: BlockManager) -> list[Move]:
        moves = take(self)
        late = kept.get(id(self), [])
        kept[id(self)] = [move for move in moves if move.kind == BlockMove.SWAP_OUT]
        return late + [move for move in moves if move.kind != BlockMove.SWAP_OUT]

    return patch.object(BlockManager, "take_moves", take_late)


def moves_left_out(kind: BlockMove) -> Any:
    """Moves of one kind are decided and never done."""
    take = BlockManager.take_moves
    return patch.object(BlockManager, "take_moves", lambda self: [move for move in take(self) if move.kind != kind])


# --- guards switched off ----------------------------------------------------------------------------------------------


def untagged(fault: Patch) -> Patch:
    """The fault in a WorkAgent that does not look at the tags of its blocks."""

    @contextmanager
    def both() -> Iterator[None]:
        with fault(), patch.multiple(BlockGuard, move=lambda self, moves: None, check=lambda self, step: None):
            yield

    return both


def moved_untagged(fault: Patch) -> Patch:
    """The fault in a WorkAgent that believes whatever is moved."""

    @contextmanager
    def both() -> Iterator[None]:
        with fault(), patch.object(BlockGuard, "_check_source", lambda self, source, move: None):
            yield

    return both


def rows_of_lost_places_count() -> Any:
    """Blocks of a row are named although its request has lost them since."""
    confirm = Scheduler._confirm

    def confirm_any(self: Scheduler, rows: list[ScheduledRow]) -> None:
        confirm(self, [row._replace(num_preemptions=row.request.num_preemptions) for row in rows])

    return patch.object(Scheduler, "_confirm", confirm_any)


def tokens_on_the_device_are_forgotten() -> Any:
    """A preempted request does not wait for the tokens that its last steps have chosen."""
    preempt = GivingWay.preempt

    def preempt_and_forget(self: GivingWay, request: Any, *rest: Any) -> None:
        preempt(self, request, *rest)
        request.num_tokens_in_flight = 0

    return patch.object(GivingWay, "preempt", preempt_and_forget)


def nobody_is_blamed() -> Any:
    """What was lost with a WorkAgent is taken for replied to."""
    return patch.object(Scheduler, "lose_cache", lambda self: None)


@contextmanager
def told_of_prompts_again() -> Iterator[None]:
    """What is computed again of a prompt is asked for again, and counts as new."""
    take_prompt = OutputProcessor.take_prompt

    def ask_again(rows: Sequence[ScheduledRow]) -> list[PromptResults]:
        told = [(row.request, row.request.num_results) for row in rows]
        for request, _ in told:
            request.num_results = 0
        results = prompt_results_of(rows)
        for request, num_results in told:
            request.num_results = num_results
        return results

    def take_any(self: OutputProcessor, request: Any, start: int, logprobs: Any, vector: Any) -> None:
        self._states[request.request_id].num_results = start
        take_prompt(self, request, start, logprobs, vector)

    with (
        patch.object(scheduler_module, "prompt_results_of", ask_again),
        patch.object(OutputProcessor, "take_prompt", take_any),
    ):
        yield


def results_taken_from_others() -> Any:
    """Tokens that are to give a result are taken from whoever has computed them."""
    return patch.object(Request, "max_tokens_taken", property(lambda self: self.num_tokens_known - 1))


def any_token_is_shown() -> Any:
    """A start takes the first connection that comes, also one of an earlier start, whose answers come late."""

    def come_first(self: Arrivals, token: str, channel: Any) -> bool:
        if not self._expected:
            return False
        self._expected.popitem()[1].put(channel)
        return True

    return patch.object(Arrivals, "come", come_first)


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
                stack.enter_context(patch.object(supervised_executor, "FIRST_DELAY_S", 0.0))
                one = Simulation(seed, mutation.num_machines)
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
    with patch.object(Scheduler, "lose_cache", autospec=True, side_effect=Scheduler.lose_cache) as lose_cache:
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
