"""Test batch invariance of every model family; print a table with a row for each model.

    PYTHONPATH=tests .venv/bin/python -m families.exactness [NAME ...] [--kernels program plain kv8 ...]

The reference runs four requests one at a time, each prompt in one step, without reuse of blocks. The same requests then
run with chunked prefill, in a batch, after prefix hits, after preemption (swap and recompute), after a WorkAgent
restart, and with draft tokens. Tokens and log-probabilities must be bit-identical. Free blocks, and all blocks after a
restart, hold NaN, so that a stale read changes the answer. `plain` runs in a process without the operator library,
which would replace MindSpore's matrix products. Needs no device and no torch; takes minutes.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from families import models
from llm_serving.core.enums import ImplementationName
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import StepInput
from llm_serving.errors import ModelError, WorkerDiedError
from llm_serving.kvcache import BlockPool
from llm_serving.models.spec import ModelSpec
from llm_serving.worker.model_runner import ModelRunner
from support.engine_harness import bytes_of
from support.fake_speculation import KnownAnswerDrafts
from support.fragile_harness import FragileHarness
from support.graph_model import backend, implementation_of, poison
from support.without_library import cell_of, is_without_library

BLOCK_SIZE, NUM_BLOCKS, NUM_SWAP_BLOCKS = 16, 32, 12
NUM_STATE_SLOTS, MAX_NUM_SEQS = 14, 8
NEW_TOKENS = 10
KERNELS: Final = ("program", "primitives", "plain")
MINDFORMERS: Final = (ImplementationName.MINDFORMERS, ImplementationName.MINDFORMERS_LEGACY)
"""Networks of MindFormers, if it is installed."""
SAME, REFUSED = "same bytes", "refused"
"""What a cell contains, or with what it begins, unless answers differ."""
CODED_CACHE: Final = "kv8"
"""A program with an int8 KV cache."""


class Served:
    """A small model, and engines that share one runner of it."""

    def __init__(self, name: str, folder: Path, kernels: str = "program", dtype: str = "bfloat16") -> None:
        """Raise ModelError if the kernels lack something that the model needs."""
        models.write(name, folder)
        golden = models.golden(name)
        longest = golden.served_length or max(golden.prompts) + models.NEW_TOKENS
        spec = replace(ModelSpec.from_folder(folder), max_position_embeddings=longest)
        made = backend("plain" if kernels == "plain" else "cpu", dtype)
        as_program = kernels in ("program", CODED_CACHE)

        def runner(spec: ModelSpec) -> ModelRunner:
            return ModelRunner(
                spec,
                folder,
                made,
                spec.layout.num_blocks(NUM_BLOCKS),
                BLOCK_SIZE,
                longest,
                num_swap_blocks=spec.layout.num_blocks(NUM_SWAP_BLOCKS),
                num_state_slots=NUM_STATE_SLOTS,
                as_program=as_program,
                implementation=implementation_of(kernels),
                int8_cache=kernels == CODED_CACHE,
            )

        self._runner = runner(spec)
        self.layout = self._runner.spec.layout
        long, short = (golden.prompts[length].token_ids.tolist() for length in (max(golden.prompts), 5))
        sampled = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.9, top_p=0.95, seed=11, logprobs=3)
        greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, logprobs=3)
        self._most = len(long)
        half, third, end = (self._most * share // 20 for share in (10, 7, 14))
        self._requests = {
            "long": (long[:half], greedy),
            "alike": (long[:third] + short, greedy),
            "short": (short, greedy),
            "sampled": (long[half:end], sampled),
        }
        self.alone: dict[str, str] = {}
        self._tokens: dict[str, list[int]] = {}
        for name in self._requests:
            harness = self.harness(slides=False)
            self.alone |= self._answer(harness, name)
            self._tokens[name] = harness.token_ids(name)
        if as_program:  # in one group, blocks are held to the end
            self._runner = runner(spec.with_cache_groups(longest, int8=kernels == CODED_CACHE))
            self.layout = self._runner.spec.layout

    def request(self, name: str, request_id: str | None = None, priority: int = 0) -> Request:
        prompt, sampling = self._requests[name]
        return Request(request_id or name, list(prompt), sampling, priority=priority)

    def harness(self, *, slides: bool = True, **scheduler: Any) -> FragileHarness:
        """An engine whose cache is filled with NaN."""
        options: dict[str, Any] = {
            "num_blocks": self.layout.num_blocks(NUM_BLOCKS),
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": 128,
            "max_model_len": NUM_BLOCKS * BLOCK_SIZE,
            "windows": self.layout.windows if slides else (),
            "max_num_seqs": MAX_NUM_SEQS,
        }
        if self._runner.spec.states:
            options["num_spare_states"] = NUM_STATE_SLOTS - MAX_NUM_SEQS
        harness = FragileHarness(new_runner=self._new_runner, **options | scheduler)
        harness.executor.spoil = partial(self._poison_free_blocks, harness)
        return harness

    # --- what may happen to a request -------------------------------------------------------------------------------

    def in_chunks(self) -> dict[str, str]:
        found = {}
        for name in self._requests:
            found |= self._answer(self.harness(max_num_batched_tokens=7, max_num_seqs=1), name)
        return found

    def beside_others(self) -> dict[str, str]:
        return self._answer(self.harness(max_num_batched_tokens=48), *self._requests)

    def after_hits(self) -> dict[str, str]:
        harness = self.harness(prefix_caching=True)
        first = self._answer(harness, "long")
        found = self._answer(harness, *self._requests, times=2)
        assert harness.metrics._counts["vllm:prefix_cache_hits_total"] >= self._most // 4
        return first | found

    def computed_again(self) -> dict[str, str]:
        return self._displaced(preemption_mode="recompute")

    def swapped(self) -> dict[str, str]:
        num_swap_blocks = self.layout.num_blocks(NUM_SWAP_BLOCKS)
        return self._displaced(preemption_mode="swap", num_swap_blocks=num_swap_blocks)

    def with_drafts(self) -> dict[str, str]:
        """Answer the requests in one batch with draft tokens, a third of them wrong."""
        drafter = KnownAnswerDrafts(random.Random(3), self._tokens, 0.3)
        drafter.vocab_size = self._runner.spec.vocab_size
        harness = self.harness(drafter=drafter, prefix_caching=True)
        found = self._answer(harness, *self._requests)
        assert sum(harness.metrics.draft_tokens["vllm:spec_decode_num_draft_tokens_total"].values()) > 10
        return found

    def after_deaths(self) -> dict[str, str]:
        """The WorkAgent dies in a prefill step, and twice during decoding."""
        harness = self.harness(max_num_batched_tokens=32)
        due = [0, 3, 7]
        """Requests that have output tokens."""
        poison = harness.executor.spoil

        def die(step: StepInput) -> None:
            poison(step)
            running = harness.scheduler.running
            if step.step > 0 and due and max((each.num_output_tokens for each in running), default=0) >= due[0]:
                del due[0]
                raise WorkerDiedError("killed")

        harness.executor.spoil = die
        found = self._answer(harness, *self._requests)
        assert harness.executor.num_restarts == 3
        return found

    def _displaced(self, **scheduler: Any) -> dict[str, str]:
        """Requests of a higher class take the only running slot."""
        found = {}
        for name in ("long", "sampled"):
            harness = self.harness(max_num_seqs=1, max_num_batched_tokens=40, max_preemptions=3, **scheduler)
            low = self.request(name, priority=1)
            harness.engine.submit(low)
            for number in range(4):
                for _ in range(3):
                    harness.engine.step()
                harness.engine.submit(self.request("short", f"high {number}", priority=-1))
            harness.run()
            assert low.num_preemptions > 0
            found[name] = bytes_of(harness.answer(name))
        return found

    # --- inside -----------------------------------------------------------------------------------------------------

    def _answer(self, harness: FragileHarness, *names: str, times: int = 1) -> dict[str, str]:
        ids = [(name, name if number == 0 else f"{name} {number}") for name in names for number in range(times)]
        for name, request_id in ids:
            harness.pieces.pop(request_id, None)
            harness.engine.submit(self.request(name, request_id))
        harness.run()
        return {request_id: bytes_of(harness.answer(request_id)) for _, request_id in ids}

    def _new_runner(self) -> ModelRunner:
        """The state of a new WorkAgent, except the cache."""
        self._poison(range(self.layout.num_blocks(NUM_BLOCKS)), range(NUM_STATE_SLOTS))
        self._runner._next_step = 0
        return self._runner

    def _poison_free_blocks(self, harness: FragileHarness, step: StepInput) -> None:
        """Fill free blocks and slots of states with NaN: those that no request, no cached prefix and no submitted step
        uses.
        """
        blocks, steps = harness.scheduler.blocks, (step, *harness.executor._submitted)
        used, used_slots = _held(blocks.pool), _held(blocks.states.pool) if blocks.states is not None else set()
        for submitted in steps:
            used.update(submitted.block_tables.ravel().tolist(), submitted.block_moves[:, 1:3].ravel().tolist())
            used_slots.update(submitted.states[:, 2].tolist())
        self._poison(set(range(blocks.pool.num_blocks)) - used, set(range(NUM_STATE_SLOTS)) - used_slots)

    def _poison(self, block_ids: Iterable[int], state_slots: Iterable[int]) -> None:
        poison(self._runner.kv_tensors, block_ids, state_slots)


def _held(pool: BlockPool) -> set[int]:
    return {each for each in range(pool.num_blocks) if pool.ref_count(each) or pool._hashes[each] is not None}


SCENARIOS: Final[dict[str, Callable[[Served], dict[str, str]]]] = {
    "chunks": Served.in_chunks,
    "neighbours": Served.beside_others,
    "prefix hits": Served.after_hits,
    "recompute": Served.computed_again,
    "swap": Served.swapped,
    "deaths": Served.after_deaths,
    "drafts": Served.with_drafts,
}


def differing(served: Served) -> list[str]:
    """Return the scenarios that change an answer: `scenario (requests)`."""
    found = []
    for name, scenario in SCENARIOS.items():
        answers = scenario(served)
        wrong = sorted(each for each, answer in answers.items() if answer != served.alone[each.split()[0]])
        if wrong:
            found.append(f"{name} ({', '.join(wrong)})")
    return found


def cell(name: str, kernels: str, dtype: str) -> str:
    if kernels == "plain" and not is_without_library():
        return cell_of(["families.exactness", name, "--kernels", kernels, "--dtype", dtype])
    with tempfile.TemporaryDirectory() as folder:
        try:
            served = Served(name, Path(folder), kernels, dtype)
        except ModelError as refusal:
            return f"{REFUSED}: {refusal}"
        return "; ".join(differing(served)) or SAME


def main() -> int:
    """Print the table. Return 1 if an answer differs, and in a process without the library 0, because its caller prints
    the cell.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; default: all")
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=(*KERNELS, *MINDFORMERS, CODED_CACHE))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    sys.stdout.write(f"| model | {' | '.join(arguments.kernels)} |\n| --- |{' --- |' * len(arguments.kernels)}\n")
    different = False
    for name in arguments.names or models.names():
        cells = [cell(name, kernels, arguments.dtype) for kernels in arguments.kernels]
        different |= any(each != SAME and not each.startswith(REFUSED) for each in cells)
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")
        sys.stdout.flush()
    return int(different and not is_without_library())


if __name__ == "__main__":
    sys.exit(main())
