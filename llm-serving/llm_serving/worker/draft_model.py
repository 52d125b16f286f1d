"""Draft tokens from a small model (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
2023).

The draft model samples with the random number that the request uses at the same position. So it proposes the served
model's token wherever both distributions agree. The served model verifies each token, so answers do not depend on
drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llm_serving.core.step import (
    DRAFT_WINDOW,
    MAX_DRAFT_REQUESTS,
    MAX_DRAFT_TOKENS,
    MAX_PROPOSED_TOKENS,
    DraftRequest,
    ResultKind,
    SamplingInput,
    StepInput,
    blocks_per_draft_request,
)
from llm_serving.worker.model_runner import ModelRunner


class DraftSlot:
    """Cache blocks of the draft model, and the tokens that they hold."""

    def __init__(self, blocks: range) -> None:
        self.blocks = np.array(blocks, np.int32)
        self.start = 0
        self.token_ids: list[int] = []

    def switch_to(self, start: int, token_ids: list[int]) -> int:
        """Assign `token_ids` to the slot. Return how many of the first ones are already cached, at most all but one."""
        known = 0
        if start == self.start:
            for before, now in zip(self.token_ids, token_ids[:-1], strict=False):
                if before != now:
                    break
                known += 1
        self.start, self.token_ids = start, list(token_ids)
        return known


class DraftRow(NamedTuple):
    """A request in a step.

    `number`: its index among all requests. `num_cached`: number of its first tokens that are cached.
    """

    number: int
    slot: DraftSlot
    num_cached: int


class DraftModel:
    """Runs the draft model. Only the thread of its runner may call it."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        """`vocab_size`: vocabulary size of the served model. Tokens beyond it are not proposed."""
        self._runner = runner
        self._vocab_size = vocab_size
        self.blocks_per_request = count = blocks_per_draft_request(runner.kv_tensors.block_size)
        self._free = [DraftSlot(range(index * count, (index + 1) * count)) for index in range(MAX_DRAFT_REQUESTS)]
        self._slots: OrderedDict[int, DraftSlot] = OrderedDict()
        self._step = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return up to `num_draft_tokens` draft tokens for each request, and none for a request that exceeds a limit.

        If the model fails, drop all cached tokens and raise WorkerError.
        """
        proposed: list[list[int]] = [[] for _ in requests]
        try:
            rows = self._rows(requests)
            while rows:
                rows = self._extend(requests, rows, proposed)
        except Exception:
            self._free += self._slots.values()
            self._slots.clear()
            for slot in self._free:
                slot.token_ids = []
            raise
        return proposed

    def _rows(self, requests: Sequence[DraftRequest]) -> list[DraftRow]:
        rows, left = [], MAX_PROPOSED_TOKENS
        for index, request in enumerate(requests[:MAX_DRAFT_REQUESTS]):
            token_ids = request.token_ids
            if not (0 < len(token_ids) <= DRAFT_WINDOW and 0 < request.num_draft_tokens <= MAX_DRAFT_TOKENS):
                continue
            if not 0 <= min(token_ids) <= max(token_ids) < self._runner.spec.vocab_size:
                continue
            slot = self._slots.pop(request.key, None)
            if slot is None:
                slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
                slot.token_ids = []
            self._slots[request.key] = slot
            before = slot.start, slot.token_ids
            known = slot.switch_to(request.start, token_ids)
            if len(token_ids) - known > left:
                slot.start, slot.token_ids = before
                continue
            left -= len(token_ids) - known
            rows.append(DraftRow(index, slot, known))
        return rows

    def _extend(
        self, requests: Sequence[DraftRequest], rows: list[DraftRow], proposed: list[list[int]]
    ) -> list[DraftRow]:
        extended = [requests[index] for index, _, _ in rows]
        known = np.array([known for _, _, known in rows], np.int32)
        lens = np.array([len(slot.token_ids) for _, slot, _ in rows], np.int32)
        positions = [each.start + int(length) for each, length in zip(extended, lens, strict=True)]
        blocks = np.stack([slot.blocks for _, slot, _ in rows])
        step = StepInput(
            step=self._step,
            token_ids=np.concatenate([np.array(slot.token_ids[known:], np.int32) for _, slot, known in rows]),
            query_lens=lens - known,
            num_computed=known,
            block_tables=blocks[:, : -(-int(lens.max()) // self._runner.kv_tensors.block_size)],
            block_epochs=np.zeros_like(blocks)[:, : -(-int(lens.max()) // self._runner.kv_tensors.block_size)],
            result_tokens=np.array(
                [(row, int(count) - 1, ResultKind.TOKEN) for row, count in enumerate(lens - known)], np.int32
            ),
            sampling=_sampling(extended, positions),
        )
        self._step += 1
        chosen = self._choose(step, rows)
        unfinished = []
        for (index, slot, _), token_id in zip(rows, chosen, strict=True):
            if not 0 <= token_id < self._vocab_size:
                continue
            proposed[index].append(token_id)
            if len(proposed[index]) < requests[index].num_draft_tokens:
                unfinished.append(DraftRow(index, slot, len(slot.token_ids)))
                slot.token_ids.append(token_id)
        return unfinished

    def _choose(self, step: StepInput, rows: Sequence[DraftRow]) -> list[int]:
        """Compute the tokens that are not cached. Return the next token of each row; -1: none."""
        token_ids: list[int] = self._runner.execute(step).token_ids.tolist()
        return token_ids


def _sampling(requests: Sequence[DraftRequest], positions: Sequence[int]) -> SamplingInput:
    return SamplingInput.plain(
        len(requests),
        temperature=np.array([each.temperature for each in requests], np.float32),
        top_k=np.array([each.top_k for each in requests], np.int32),
        top_p=np.array([each.top_p for each in requests], np.float32),
        min_p=np.array([each.min_p for each in requests], np.float32),
        seed=np.array([each.seed for each in requests], np.uint64),
        position=np.array(positions, np.int32),
    )
