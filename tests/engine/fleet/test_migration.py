"""Two engines over fake models that share a transfer pool: requests begin at the first and go on at the second."""

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
from support.engine_harness import Harness
from support.fake_runner import FakeRunner, FakeTransferPool, expected_output
from support.listeners import FunctionListener

BLOCK_SIZE = 4
PROMPT = list(range(10))
NUM_BLOCKS = 24
"""Of each replica's part of the transfer pool."""


class Mortal(FakeRunner):
    """Dies with the step that comes when it is told to."""

    dies = False

    def execute(self, step: StepInput, await_allowed: Any = None) -> StepOutput:
        if self.dies:
            raise WorkerDiedError("killed")
        return super().execute(step, await_allowed)


class Pair:
    """Run by hand; whoever is to move does so when `hand_over` is called."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, **scheduler: Any) -> None:
        self.pool = FakeTransferPool(2 * num_blocks)
        self.departures: list[MigratingRequest] = []
        self.first, self.second = (
            self._harness(TransferPool(num_blocks, index * num_blocks), **scheduler) for index in range(2)
        )
        self.first.engine.add_listener(FunctionListener(on_departures=self.departures.extend))
        self.second.engine.add_listener(FunctionListener(on_blocks_released=self.first.engine.give_back))

    def _harness(self, exports: TransferPool, **scheduler: Any) -> Harness:
        harness = Harness(runner=Mortal, exports=exports, **scheduler)
        harness.executor.restart = lambda reason: self._revive(harness)  # type: ignore[method-assign]
        self._revive(harness)
        return harness

    def _revive(self, harness: Harness) -> None:
        """Another WorkAgent, with empty caches and the same transfer pool."""
        blocks = harness.scheduler.blocks
        sizes = blocks.pool.num_blocks, blocks.block_size, blocks.host_pool.num_blocks, blocks.window.num_tokens
        harness.runner = Mortal(*sizes, self.pool)
        harness.executor._runner = harness.runner
        harness.executor._submitted.clear()
        harness.executor.next_step = 0

    def submit(self, *requests: Request) -> None:
        for request in requests:
            request.wants_migration = True
            self.first.engine.submit(request)

    def hand_over(self) -> None:
        for departure in self.departures:
            self.second.engine.take_over(departure)
        self.departures.clear()

    def run(self) -> None:
        for _ in range(300):
            progressed = [self.first.engine.step(), self.second.engine.step()]
            for each in (self.first, self.second):
                each.scheduler.check_integrity()
            if not any(progressed) and not self.departures:
                break
            self.hand_over()
        self.first.engine.step()  # takes what it is given back
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


@pytest.mark.parametrize("window", [None, 6])
def test_the_prompt_is_computed_at_one_replica_and_nothing_but_answers_at_the_other(window: int | None) -> None:
    pair = Pair(window=window)
    pair.submit(*requests(3))
    pair.run()
    if window is None:
        check_answers(pair, 3)
    assert num_computed(pair.first.runner) == 3 * 11
    assert num_computed(pair.second.runner) == 3 * 7
    assert [len(pair.first.token_ids(f"r{index}")) for index in range(3)] == [1, 1, 1]
    told = {sample.name: sample.value for metric in pair.second.metrics.moves.collect() for sample in metric.samples}
    assert told["llm_serving:moved_requests_total"] == 3
    assert told["llm_serving:moved_blocks_total"] == (9 if window is None else 6)


def test_what_ends_with_its_first_token_does_not_move() -> None:
    pair = Pair()
    pair.submit(*requests(1, max_tokens=1))
    pair.run()
    check_answers(pair, 1, max_tokens=1)
    assert not pair.second.runner.steps


def test_while_there_is_no_room_to_hand_it_over_a_request_goes_on_where_it_is() -> None:
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


def test_a_replica_that_dies_before_it_takes_blocks_over_takes_them_when_it_is_back() -> None:
    pair = Pair()
    pair.submit(*requests(2))
    pair.first.run()
    pair.second.runner.dies = True
    pair.second.engine.submit(Request("other", PROMPT, SamplingParams(max_tokens=2, seed=3)))
    pair.second.engine.step()
    pair.hand_over()
    pair.run()
    check_answers(pair, 2)


def test_a_replica_that_dies_while_it_takes_blocks_over_computes_all_again() -> None:
    pair = Pair()
    pair.submit(*requests(2))
    pair.first.run()
    pair.hand_over()
    pair.second.runner.dies = True
    pair.run()
    check_answers(pair, 2)
    assert num_computed(pair.second.runner) == 2 * (11 + 7)


def test_a_replica_that_dies_while_it_hands_blocks_over_begins_anew() -> None:
    pair = Pair()
    pair.first.runner.dies = True
    pair.submit(*requests(2))
    pair.run()
    check_answers(pair, 2)


def test_what_was_handed_over_is_there_when_its_replica_has_died() -> None:
    pair = Pair()
    pair.submit(*requests(2))
    pair.first.run()
    pair.first.runner.dies = True
    pair.first.engine.submit(Request("other", PROMPT, SamplingParams(max_tokens=2, seed=3)))
    pair.first.engine.step()
    pair.run()
    check_answers(pair, 2)
    assert num_computed(pair.second.runner) == 2 * 7


def test_where_nobody_else_decodes_a_request_goes_on_where_it_began_with_its_deadline() -> None:
    pair = Pair()
    timed = requests(6)
    for request in timed:
        request.deadline = 1e9
    pair.submit(*timed)
    pair.second = pair.first
    pair.first.engine.add_listener(FunctionListener(on_blocks_released=pair.first.engine.give_back))
    pair.run()
    for index in range(6):
        assert pair.first.token_ids(f"r{index}") == expected_output([index, *PROMPT], 8, 3)


@pytest.mark.parametrize("moment", ["in the step", "on its way", "before it is taken", "in the step that takes it"])
def test_whoever_leaves_while_it_moves_leaves_no_block_behind(moment: str) -> None:
    pair = Pair()
    pair.submit(*requests(2))
    if moment == "in the step":
        pair.first.engine.step()
        pair.first.engine.abort("r0")
    pair.first.run()
    pair.hand_over()
    if moment in ("on its way", "before it is taken"):
        pair.second.engine.abort("r0")
    if moment == "in the step that takes it":
        pair.second.engine.step()
        pair.second.engine.abort("r0")
    pair.run()
    assert pair.token_ids("r1") == expected_output([1, *PROMPT], 8, 3)
    assert not pair.second.scheduler.has_unfinished_requests


def test_a_block_of_an_earlier_owner_is_never_used() -> None:
    """Another engine with the same part of the pool wrote it: its epochs are others."""
    pair = Pair()
    pair.submit(*requests(1))
    pair.first.run()
    (departure,) = pair.departures
    transfer = departure.request.transfer
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


def test_blocks_of_a_replaced_engine_fail_one_step_however_many_wait_with_some() -> None:
    """Each would fail a step of its own, and end whoever decodes meanwhile as the likely cause."""
    pair = Pair(max_prefill_seqs=1)
    pair.submit(*requests(6))
    pair.first.run()
    pair.pool.tags.epochs[:NUM_BLOCKS] += 1  # another engine has the same part of the pool
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


def test_who_waits_at_the_second_replica_was_promised_something_from_its_arrival_at_the_first() -> None:
    pair = Pair(max_num_seqs=1)
    pair.submit(*requests(3))
    pair.first.run()
    waited = [each.request.transfer.num_waited for each in pair.departures if each.request.transfer is not None]
    assert waited[0] < waited[1] < waited[2]
    moved = [each.request for each in pair.departures]
    pair.run()
    check_answers(pair, 3)
    for request, before in zip(moved, waited, strict=True):
        assert request.num_steps_waited is not None and request.wait_bound is not None
        assert before <= request.num_steps_waited <= request.wait_bound
