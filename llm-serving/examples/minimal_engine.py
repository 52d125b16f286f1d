"""The server without HTTP, processes and MindSpore: its scheduler, blocks, step builder and executor, and a toy model.

    .venv/bin/python llm-serving/examples/minimal_engine.py

The loop in `generate` is the one that `llm_serving/engine/engine.py` runs for each replica. Everything that the engine
does beside it (clients, drafts, restarts, metrics) is left out. `ToyModel` takes the place of a WorkAgent's model.

The model continues arithmetic sequences. It finds the two newest tokens of a request only by its block table, so a
block given to two requests, or a token computed twice, would show in the output.
"""

from __future__ import annotations

import numpy as np
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.request_class import DEFAULT_CLASSES
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import Int32Array, StepInput, StepOutput, no_top_tokens
from llm_serving.executor.executor import LocalExecutor
from llm_serving.executor.step_builder import StepBuilder
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler import Schedule, Scheduler, SchedulerLimits, SchedulingRules
from llm_serving.scheduler.policies import POLICIES, ArrivalOrder

BLOCK_SIZE = 4
"""Tokens of a KV cache block."""
NUM_BLOCKS = 12
"""Few, so that requests are preempted."""
PROMPTS = {
    "threes": [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42],
    "tens": [10, 20, 30],
    "down": [90, 89, 88, 87, 86],
    "sevens": [7, 14, 21, 28, 35, 42],
}
"""Request id -> prompt, as token ids."""


class ToyModel:
    """A model whose KV cache holds token ids, and whose next token is the newest one plus the difference before it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._cache = np.full((num_blocks, block_size), -1)
        self._block_size = block_size

    def execute(self, step: StepInput) -> StepOutput:
        """Write the tokens of a step into the cache, then return one new token for each result that it wants.

        The arrays of a step have one row for each request: `query_lens` new tokens follow `num_computed` tokens that
        the cache already holds, in the blocks of `block_tables`.
        """
        end_of_row = np.cumsum(step.query_lens)
        for row, table in enumerate(step.block_tables):
            new_tokens = step.token_ids[end_of_row[row] - step.query_lens[row] : end_of_row[row]]
            for offset, token in enumerate(new_tokens):
                self._cache[self._slot(table, step.num_computed[row] + offset)] = token
        sampled = []
        for row, offset, _ in step.result_tokens:  # (row, token of the row, kind of result)
            position = step.num_computed[row] + offset
            newest, before = (self._cache[self._slot(step.block_tables[row], position - back)] for back in (0, 1))
            sampled.append(max(0, 2 * newest - before))
        token_ids = np.array(sampled, np.int32)
        return StepOutput(step.step, token_ids, np.zeros(len(token_ids), np.float32), no_top_tokens(len(token_ids)))

    def _slot(self, table: Int32Array, position: int) -> tuple[int, int]:
        """Return block and offset of a token: this is what the slot mapping of a paged cache is."""
        return table[position // self._block_size], position % self._block_size


def create_scheduler() -> Scheduler:
    """Return the server's scheduler with limits so small that each of them takes effect."""
    config = ServingConfig()
    limits = SchedulerLimits(
        max_num_batched_tokens=8,  # a prompt of 14 tokens is computed in two chunks
        max_num_seqs=3,  # the fourth request waits for a running slot
        max_prefill_seqs=2,
        max_model_len=40,
    )
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    rules = SchedulingRules(limits, POLICIES["mixed"](config), DEFAULT_CLASSES, ArrivalOrder(), prefix_caching=True)
    return Scheduler(rules, blocks)


def create_requests(max_tokens: int) -> list[Request]:
    """Return one greedy request for each of `PROMPTS`."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [
        Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            stop_token_ids=frozenset(),
            arrival_time=0.0,
        )
        for name, prompt in PROMPTS.items()
    ]


def generate(scheduler: Scheduler, requests: list[Request]) -> int:
    """Run steps until all requests have finished; print each step and return their number."""
    builder = StepBuilder(scheduler.blocks)
    executor = LocalExecutor(ToyModel(NUM_BLOCKS, BLOCK_SIZE))
    for request in requests:
        scheduler.add(request)
    while (schedule := scheduler.schedule(now=0.0)) is not None:
        step = builder.build(schedule, executor.next_step)
        print(describe(schedule, scheduler))
        executor.submit(step)
        output = executor.collect()
        scheduler.update(schedule, output.token_ids.tolist())
    return executor.next_step


def describe(schedule: Schedule, scheduler: Scheduler) -> str:
    """Return one line: what each request computes in a step, who was preempted, and how many blocks are in use."""
    rows = [f"{row.request.request_id} {row.num_computed}+{row.query_len}" for row in schedule.rows]
    preempted = [f"preempted {request.request_id}" for request in schedule.preempted]
    pool = scheduler.blocks.pool
    return f"{', '.join(rows + preempted):60} {pool.num_used_blocks:2} of {pool.num_blocks} blocks"


def main() -> None:
    requests = create_requests(max_tokens=12)
    print("each step: request, tokens computed before + tokens computed now\n")
    num_steps = generate(create_scheduler(), requests)
    print(f"\n{num_steps} steps")
    for request in requests:
        print(f"{request.request_id:7} {request.prompt_token_ids} -> {request.output_token_ids}")


if __name__ == "__main__":
    main()
