"""Injected faults that would garble text, and patches that switch off the guards against them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import support.simulated_agent
from llm_serving.core.request import Request
from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.executor.cluster.listener import PendingStarts
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.kvcache.block_manager import BlockManager
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import PrefixSearch
from llm_serving.scheduler import Scheduler
from llm_serving.scheduler import scheduler as scheduler_module
from llm_serving.scheduler.preemption import Preemptor
from llm_serving.scheduler.schedule import PromptResults, ScheduledRow, collect_prompt_results
from llm_serving.transport.messages import StepDone
from llm_serving.worker.block_guard import BlockGuard
from support.simulated_agent import SimulatedAgent

Patch = Callable[[], Any]

# --- faults -----------------------------------------------------------------------------------------------------------


def reply_read_early(*, numbered: bool) -> Any:
    """Make the master sometimes read the reply to the previous step again, in place of the one that it waits for."""
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
    """Write every step to the same buffer, even if the previous one has not been read."""
    start = RemoteExecutor.__init__

    def start_with_one(self: RemoteExecutor, channel: Any, buffers: Any, *others: Any) -> None:
        start(self, channel, buffers, *others)
        self._num_buffers = 1

    from_arrays = support.simulated_agent.step_from_arrays

    def unnumbered(step: int, arrays: list[Any], *others: Any) -> Any:
        arrays[0] = arrays[0] * 0 + step
        return from_arrays(step, arrays, *others)

    with ExitStack() as stack:
        stack.enter_context(patch.object(RemoteExecutor, "__init__", start_with_one))
        if not owned:
            stack.enter_context(patch.object(RemoteExecutor, "_check_unused", lambda self, buffer: None))
        if not numbered:
            stack.enter_context(patch.object(support.simulated_agent, "step_from_arrays", unnumbered))
        yield


def block_allocated_twice() -> Any:
    """Make the block pool sometimes allocate a block that another request already has."""
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
            pool.add_references([held[0]])
            pool._epochs[held[0]] = pool._num_allocations
            if (name := pool._hashes[held[0]]) is not None:
                del pool._blocks_by_hash[name]
                pool._hashes[held[0]] = None
            block_ids.append(held[0])
        return block_ids

    return patch.object(BlockPool, "allocate", allocate_twice)


def position_kept_after_preemption() -> Any:
    """Make a preempted request keep `num_computed_tokens`, although its blocks were freed."""
    preempt = Preemptor.preempt

    def preempt_badly(self: Preemptor, request: Any, *rest: Any) -> None:
        before = request.num_computed_tokens
        preempt(self, request, *rest)
        if not self._blocks.is_swapped(request.request_id):
            request.num_computed_tokens = before

    return patch.object(Preemptor, "preempt", preempt_badly)


def no_copies() -> Any:
    return moves_left_out(BlockMoveKind.COPY)


def no_swaps_in() -> Any:
    return moves_left_out(BlockMoveKind.SWAP_IN)


def swapped_out_late() -> Any:
    """Swap a block out one step late, after it was allocated to another request."""
    take = BlockManager.pop_block_moves
    kept: dict[int, list[BlockMove]] = {}

    def take_late(self: BlockManager) -> list[BlockMove]:
        moves = take(self)
        late = kept.get(id(self), [])
        kept[id(self)] = [move for move in moves if move.kind == BlockMoveKind.SWAP_OUT]
        return late + [move for move in moves if move.kind != BlockMoveKind.SWAP_OUT]

    return patch.object(BlockManager, "pop_block_moves", take_late)


def moves_left_out(kind: BlockMoveKind) -> Any:
    take = BlockManager.pop_block_moves
    return patch.object(
        BlockManager, "pop_block_moves", lambda self: [move for move in take(self) if move.kind != kind]
    )


def hit_without_window() -> Any:
    """Let a prefix hit have no blocks of groups with a window."""
    start = PrefixSearch._start
    return patch.object(
        PrefixSearch,
        "_start",
        lambda self, window, end: end if window.is_sliding else start(self, window, end),
    )


def block_freed_too_early() -> Any:
    """Free each block of a window a block too early."""
    free = BlockManager.free_outside_window
    return patch.object(
        BlockManager,
        "free_outside_window",
        lambda self, request_id, num_computed: free(self, request_id, num_computed + self.block_size),
    )


# --- guards switched off ----------------------------------------------------------------------------------------------


def untagged(fault: Patch) -> Patch:
    """Return the fault with a WorkAgent that does not check the tags of its blocks."""

    @contextmanager
    def both() -> Iterator[None]:
        with fault(), patch.multiple(BlockGuard, move=lambda self, moves: None, check=lambda self, step: None):
            yield

    return both


def moved_untagged(fault: Patch) -> Patch:
    """Return the fault with a WorkAgent that does not check the source tags of moves."""

    @contextmanager
    def both() -> Iterator[None]:
        with fault(), patch.object(BlockGuard, "_check_source", lambda self, source, move: None):
            yield

    return both


def preempted_rows_confirmed() -> Any:
    """Keep the rows of requests that were preempted after the step was scheduled."""
    confirm = Scheduler._confirm

    def confirm_any(self: Scheduler, rows: list[ScheduledRow]) -> None:
        confirm(self, [row._replace(num_preemptions=row.request.num_preemptions) for row in rows])

    return patch.object(Scheduler, "_confirm", confirm_any)


def tokens_in_flight_forgotten() -> Any:
    """Make a preempted request runnable before the tokens of its steps in flight are known."""
    preempt = Preemptor.preempt

    def preempt_and_forget(self: Preemptor, request: Any, *rest: Any) -> None:
        preempt(self, request, *rest)
        request.num_tokens_in_flight = 0

    return patch.object(Preemptor, "preempt", preempt_and_forget)


def cache_not_reset() -> Any:
    """Treat everything that a lost WorkAgent computed as present in the cache."""
    return patch.object(Scheduler, "reset_cache", lambda self: None)


@contextmanager
def prompt_results_repeated() -> Iterator[None]:
    """Request prompt results again when a prompt is recomputed, and accept them as new."""
    add_prompt_result = OutputProcessor.add_prompt_result

    def ask_again(rows: Sequence[ScheduledRow]) -> list[PromptResults]:
        received = [(row.request, row.request.num_prompt_logprobs_received) for row in rows]
        for request, _ in received:
            request.num_prompt_logprobs_received = 0
        results = collect_prompt_results(rows)
        for request, num_results in received:
            request.num_prompt_logprobs_received = num_results
        return results

    def take_any(self: OutputProcessor, request: Any, start: int, logprobs: Any, vector: Any) -> None:
        self._states[request.request_id].num_results = start
        add_prompt_result(self, request, start, logprobs, vector)

    with (
        patch.object(scheduler_module, "collect_prompt_results", ask_again),
        patch.object(OutputProcessor, "add_prompt_result", take_any),
    ):
        yield


def prompt_results_skipped() -> Any:
    """Let a request reuse cached blocks of prompt tokens whose results it still needs."""
    return patch.object(Request, "max_prefix_hit_tokens", property(lambda self: self.num_tokens_known - 1))


def start_token_ignored() -> Any:
    """Accept the first connection for any start of a WorkAgent, also a late one of an earlier start."""

    def deliver_first(self: PendingStarts, token: str, channel: Any) -> bool:
        if not self._expected:
            return False
        self._expected.popitem()[1].put(channel)
        return True

    return patch.object(PendingStarts, "deliver", deliver_first)
