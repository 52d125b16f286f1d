"""Migration between two engines with fake models and a shared transfer pool."""

from __future__ import annotations

from typing import Any

import pytest
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.engine.fleet.migration import MigratingRequest
from llm_serving.errors import LLMServingError, WorkerDiedError
from llm_serving.executor.executor import StepFailedError
from llm_serving.kvcache.transfer_pool import TransferPool
from llm_serving.speculation import NgramProposer, SpeculationController
from support.engine_harness import Harness
from support.fake_runner import FakeRunner, FakeTransferPool, expected_output
from support.listeners import FunctionListener

BLOCK_SIZE = 4
PROMPT = list(range(10))
NUM_BLOCKS = 24
"""Blocks of each replica's part of the transfer pool."""


class Mortal(FakeRunner):
    """Dies in the next step once `dies` is set."""

    dies = False

    def execute(self, step: StepInput, await_allowed: Any = None) -> StepOutput:
        if self.dies:
            raise WorkerDiedError("killed")
        return super().execute(step, await_allowed)


class Pair:
    """Two engines that the test steps; requests migrate from the first to the second in `hand_over`."""

    def __init__(
        self, num_blocks: int = NUM_BLOCKS, *, drafter: SpeculationController | None = None, **scheduler: Any
    ) -> None:
        """`drafter`: of the second engine."""
        self.pool = FakeTransferPool(2 * num_blocks)
        self.migrating: list[MigratingRequest] = []
        self.first, self.second = (
            self._harness(TransferPool(num_blocks, index * num_blocks), drafter=each, **scheduler)
            for index, each in enumerate((None, drafter))
        )
        self.first.engine.add_listener(FunctionListener(on_migrating=self.migrating.extend))
        self.second.engine.add_listener(FunctionListener(on_blocks_released=self.first.engine.reclaim_blocks))

    def _harness(self, exports: TransferPool, **scheduler: Any) -> Harness:
        harness = Harness(runner=Mortal, exports=exports, **scheduler)
        harness.executor.restart = lambda reason: self._revive(harness)  # type: ignore[method-assign]
        self._revive(harness)
        return harness

    def _revive(self, harness: Harness) -> None:
        """Start another WorkAgent, with empty caches and the same transfer pool."""
        blocks = harness.scheduler.blocks
        sizes = blocks.pool.num_blocks, blocks.block_size, blocks.host_pool.num_blocks, blocks.groups
        num_slots = 0 if blocks.states is None else blocks.states.pool.num_blocks
        harness.runner = Mortal(*sizes, self.pool, num_slots)
        harness.executor._runner = harness.runner
        harness.executor._submitted.clear()
        harness.executor.next_step = 0

    def submit(self, *requests: Request) -> None:
        for request in requests:
            request.wants_migration = True
            self.first.engine.submit(request)

    def hand_over(self) -> None:
        for each in self.migrating:
            self.second.engine.take_over(each)
        self.migrating.clear()

    def run(self) -> None:
        for _ in range(300):
            progressed = [self.first.engine.step(), self.second.engine.step()]
            for each in (self.first, self.second):
                each.scheduler.check_integrity()
            if not any(progressed) and not self.migrating:
                break
            self.hand_over()
        self.first.engine.step()  # reclaims the blocks
        assert self.first.scheduler.blocks.transfer_pool.pool.num_used_blocks == 0

    def token_ids(self, request_id: str) -> list[int]:
        return self.first.token_ids(request_id) + self.second.token_ids(request_id)


def requests(count: int, max_tokens: int = 8) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, seed=3)
    return [Request(f"r{index}", [index, *PROMPT], sampling) for index in range(count)]


def check_answers(pair: Pair, count: int, max_tokens: int = 8) -> None:
    for index in range(count):
        assert pair.token_ids(f"r{index}") == expected_output([index, *PROMPT], max_tokens, 3), index
        pieces = pair.second.pieces[f"r{index}"] or pair.first.pieces[f"r{index}"]
        assert pieces[-1].finish_reason is FinishReason.LENGTH


def num_computed(runner: FakeRunner) -> int:
    return sum(step.num_tokens for step in runner.steps)


@pytest.mark.parametrize(("window", "num_spare_states"), [(None, None), (6, None), (None, 2)])
def test_one_replica_computes_the_prompts_and_the_other_only_decodes(
    window: int | None, num_spare_states: int | None
) -> None:
    pair = Pair(window=window, num_spare_states=num_spare_states)
    pair.submit(*requests(3))
    pair.run()
    if window is None:
        check_answers(pair, 3)
    assert num_computed(pair.first.runner) == 3 * 11
    assert num_computed(pair.second.runner) == 3 * 7
    assert [len(pair.first.token_ids(f"r{index}")) for index in range(3)] == [1, 1, 1]
    values = {sample.name: sample.value for metric in pair.second.metrics.collect() for sample in metric.samples}
    assert values["llm_serving:moved_requests_total"] == 3
    assert values["llm_serving:moved_blocks_total"] == (9 if window is None else 6)


def test_the_drafter_learns_a_migrated_request_when_it_starts() -> None:
    drafter = SpeculationController(4, NgramProposer(3))
    pair = Pair(drafter=drafter, max_num_seqs=4, num_blocks=64)
    pair.submit(*requests(4, 20))
    while len(pair.migrating) < 4:
        pair.first.engine.step()
    pair.hand_over()
    pair.second.engine._drain_inbox()
    assert not drafter._ngram.requests
    pair.second.engine.step()
    assert len(drafter._ngram.requests) == len(pair.second.scheduler.running) > 0
    pair.run()
    check_answers(pair, 4, 20)


def test_a_request_that_ends_with_its_first_token_does_not_migrate() -> None:
    pair = Pair()
    pair.submit(*requests(1, max_tokens=1))
    pair.run()
    check_answers(pair, 1, max_tokens=1)
    assert not pair.second.runner.steps


def test_full_transfer_pool_keeps_a_request_on_its_replica() -> None:
    pair = Pair(num_blocks=4)
    pair.submit(*requests(3, max_tokens=6))
    pair.run()
    check_answers(pair, 3, max_tokens=6)
    assert pair.second.runner.steps and sum(len(pair.first.token_ids(f"r{index}")) for index in range(3)) > 3

    never = Pair(num_blocks=2)
    never.submit(*requests(1))
    never.run()
    check_answers(never, 1)
    assert not never.second.runner.steps


def test_replica_killed_before_the_import_imports_after_its_restart() -> None:
    pair = Pair()
    pair.submit(*requests(2))
    pair.first.run()
    pair.second.runner.dies = True
    pair.second.engine.submit(Request("other", PROMPT, SamplingParams(max_tokens=2, seed=3)))
    pair.second.engine.step()
    pair.hand_over()
    pair.run()
    check_answers(pair, 2)


def test_replica_killed_during_the_import_recomputes() -> None:
    pair = Pair()
    pair.submit(*requests(2))
    pair.first.run()
    pair.hand_over()
    pair.second.runner.dies = True
    pair.run()
    check_answers(pair, 2)
    assert num_computed(pair.second.runner) == 2 * (11 + 7)


def test_replica_killed_during_the_export_recomputes() -> None:
    pair = Pair()
    pair.first.runner.dies = True
    pair.submit(*requests(2))
    pair.run()
    check_answers(pair, 2)


def test_exported_blocks_survive_the_death_of_their_replica() -> None:
    pair = Pair()
    pair.submit(*requests(2))
    pair.first.run()
    pair.first.runner.dies = True
    pair.first.engine.submit(Request("other", PROMPT, SamplingParams(max_tokens=2, seed=3)))
    pair.first.engine.step()
    pair.run()
    check_answers(pair, 2)
    assert num_computed(pair.second.runner) == 2 * 7


def test_a_request_can_migrate_to_its_own_replica_and_keeps_its_deadline() -> None:
    pair = Pair()
    timed = requests(6)
    for request in timed:
        request.deadline = 1e9
    pair.submit(*timed)
    pair.second = pair.first
    pair.first.engine.add_listener(FunctionListener(on_blocks_released=pair.first.engine.reclaim_blocks))
    pair.run()
    for index in range(6):
        assert pair.first.token_ids(f"r{index}") == expected_output([index, *PROMPT], 8, 3)


@pytest.mark.parametrize("moment", ["during export", "in migration", "before import", "during import"])
def test_a_request_aborted_during_migration_leaves_no_block_allocated(moment: str) -> None:
    pair = Pair()
    pair.submit(*requests(2))
    if moment == "during export":
        pair.first.engine.step()
        pair.first.engine.abort("r0")
    pair.first.run()
    pair.hand_over()
    if moment in ("in migration", "before import"):
        pair.second.engine.abort("r0")
    if moment == "during import":
        pair.second.engine.step()
        pair.second.engine.abort("r0")
    pair.run()
    assert pair.token_ids("r1") == expected_output([1, *PROMPT], 8, 3)
    assert not pair.second.scheduler.has_unfinished_requests


def test_a_block_of_an_earlier_owner_is_never_used() -> None:
    """A later engine with the same part of the pool wrote it with another epoch."""
    pair = Pair()
    pair.submit(*requests(1))
    pair.first.run()
    (each,) = pair.migrating
    transfer = each.request.transfer
    assert transfer is not None
    pair.pool.tags.epochs[list(transfer.block_ids)] += 1
    for block in transfer.block_ids:
        pair.pool.blocks[block] = [7] * BLOCK_SIZE
    failed: list[str] = []
    collect = pair.second.executor.collect

    def noted() -> StepOutput:
        try:
            return collect()
        except StepFailedError as error:
            failed.append(str(error))
            raise

    pair.second.executor.collect = noted  # type: ignore[method-assign]
    pair.run()
    assert failed[0] == "WorkerError: IMPORT would read block 0, which another owner has written"
    check_answers(pair, 1)
    assert num_computed(pair.second.runner) >= 11 + 7


def test_blocks_of_a_replaced_engine_fail_one_step_for_all_waiting_requests() -> None:
    """Otherwise each would fail a step, and the decoding request would be ended as the likely cause."""
    pair = Pair(max_prefill_seqs=1)
    pair.submit(*requests(6))
    pair.first.run()
    pair.pool.tags.epochs[:NUM_BLOCKS] += 1  # as if another engine wrote this part of the pool
    pair.second.engine.submit(Request("decodes", PROMPT, SamplingParams(max_tokens=8, seed=3)))
    for _ in range(3):
        pair.second.engine.step()
    recover, failed = pair.second.engine._recover, []

    def noted(error: LLMServingError) -> None:
        failed.append(str(error))
        recover(error)

    pair.second.engine._recover = noted  # type: ignore[method-assign]
    pair.run()
    assert len(failed) == 1, failed
    check_answers(pair, 6)
    assert pair.second.token_ids("decodes") == expected_output(PROMPT, 8, 3)


def test_the_wait_bound_of_a_migrated_request_counts_from_its_arrival_at_the_first_replica() -> None:
    pair = Pair(max_num_seqs=1)
    pair.submit(*requests(3))
    pair.first.run()
    waited = [each.request.transfer.num_waited for each in pair.migrating if each.request.transfer is not None]
    assert waited[0] < waited[1] < waited[2]
    moved = [each.request for each in pair.migrating]
    pair.run()
    check_answers(pair, 3)
    for request, before in zip(moved, waited, strict=True):
        assert request.num_steps_waited is not None and request.wait_bound is not None
        assert before <= request.num_steps_waited <= request.wait_bound
