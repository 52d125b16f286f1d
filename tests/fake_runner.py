"""A model without arithmetic: its cache holds token ids, its next token is a hash of what it reads there.

It reads and writes only through block tables, as a real model does, so a block given to two requests, a token computed
twice or not at all, or a step out of order changes the answer.
"""

from __future__ import annotations

import zlib
from array import array
from functools import lru_cache

import numpy as np
from llm_serving.core.step import BlockMove, StepInput, StepOutput
from llm_serving.worker.block_guard import BlockGuard

VOCAB_SIZE = 1000
_LOGITS = 4 * np.random.default_rng(0).normal(size=1 << 18)
"""What comes after a sequence begins at a place of its own here."""


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_swap_blocks = num_swap_blocks
        self.block_size = block_size
        self.steps: list[StepInput] = []
        self._cache = np.full(num_blocks * block_size, -1, np.int64)
        self._host = np.full(num_swap_blocks * block_size, -1, np.int64)
        self._guard = BlockGuard(num_blocks, num_swap_blocks, block_size)
        self._previous: list[int] = []
        self._offsets = np.arange(block_size)

    def execute(self, step: StepInput) -> StepOutput:
        assert step.step == len(self.steps)
        self.steps.append(step)
        self._guard.move(step.block_moves)
        self._guard.check(step)
        self._move_blocks(step.block_moves.tolist())
        start, sampled = 0, []
        width = max(int(step.sampling.num_logprobs.max(initial=0)), 0)
        count = len(step.sample_rows)
        logprobs = np.zeros(count, np.float32)
        top_token_ids, top_logprobs = (
            np.full((count, width), -1, np.int32),
            np.full((count, width), -np.inf, np.float32),
        )
        token_ids = [each if each >= 0 else self._previous[-1 - each] for each in step.token_ids.tolist()]
        slots = (step.block_tables[:, :, None] * self.block_size + self._offsets).reshape(step.num_rows, -1)
        sample_rows = set(step.sample_rows.tolist())
        rows = zip(slots, step.num_computed.tolist(), step.query_lens.tolist(), strict=True)
        for row, (row_slots, computed, query_len) in enumerate(rows):
            end = computed + query_len
            assert end <= len(row_slots), "the block table is too short"
            self._cache[row_slots[computed:end]] = token_ids[start : start + query_len]
            start += query_len
            if row in sample_rows:
                sample = len(sampled)
                assert step.sampling.position[sample] == end
                context = self._cache[row_slots[:end]].tolist()
                sampled.append(next_token(context, int(step.sampling.seed[sample])))
                num_logprobs = int(step.sampling.num_logprobs[sample])
                if num_logprobs >= 0:
                    distribution = next_logprobs(context)
                    logprobs[sample] = distribution[sampled[-1]]
                    top = most_likely(context)[:num_logprobs]
                    top_token_ids[sample, : len(top)], top_logprobs[sample, : len(top)] = top, distribution[top]
        self._previous = sampled
        return StepOutput(step.step, np.array(sampled, np.int32), logprobs, top_token_ids, top_logprobs)

    def _move_blocks(self, moves: list[list[int]]) -> None:
        cache, host = (memory.reshape(-1, self.block_size) for memory in (self._cache, self._host))
        for kind, source, target in moves:
            kind = BlockMove(kind)
            out_of = host if kind is BlockMove.SWAP_IN else cache
            into = host if kind is BlockMove.SWAP_OUT else cache
            assert 0 <= source < len(out_of), (kind, source, target)
            assert 0 <= target < len(into), (kind, source, target)
            into[target] = out_of[source]


def next_token(token_ids: list[int], seed: int) -> int:
    """What the fake model says after `token_ids`."""
    return zlib.crc32(array("q", [seed, *token_ids]).tobytes()) % VOCAB_SIZE


def next_logprobs(token_ids: list[int]) -> np.ndarray:
    """Log-probabilities [VOCAB_SIZE] of what comes after `token_ids`; `next_token` does not follow them."""
    return _distribution(tuple(token_ids))[0]


def most_likely(token_ids: list[int]) -> np.ndarray:
    """All tokens [VOCAB_SIZE] by `next_logprobs`, highest first."""
    return _distribution(tuple(token_ids))[1]


@lru_cache(maxsize=8192)
def _distribution(token_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    begin = zlib.crc32(array("q", token_ids).tobytes()) % (len(_LOGITS) - VOCAB_SIZE)
    logits = _LOGITS[begin : begin + VOCAB_SIZE]
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    ranked = np.argsort(-logprobs, kind="stable")
    logprobs.flags.writeable = ranked.flags.writeable = False
    return logprobs, ranked


def expected_output(prompt_token_ids: list[int], count: int, seed: int = 0) -> list[int]:
    """The fake model's answer of `count` tokens, computed without any cache."""
    token_ids = list(prompt_token_ids)
    for _ in range(count):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt_token_ids) :]
