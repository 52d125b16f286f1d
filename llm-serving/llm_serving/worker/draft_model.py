"""A small model that goes on with what the large one said; Leviathan et al., "Speculative Decoding" (2023).

It chooses with the random number that the position has in the request, so where both models agree on how likely the
tokens are, they choose the same one; the large model checks each, and an answer does not depend on any of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from llm_serving.core.step import (
    MAX_CONTINUATIONS,
    MAX_COUNT,
    MAX_PROPOSED_TOKENS,
    WINDOW,
    Continuation,
    ResultKind,
    SamplingInput,
    StepInput,
    blocks_of_continuation,
)
from llm_serving.worker.model_runner import ModelRunner


class _Slot:
    """A share of the cache, and the tokens whose keys and values are there."""

    def __init__(self, blocks: range) -> None:
        self.blocks = np.array(blocks, np.int32)
        self.start = 0
        self.token_ids: list[int] = []

    def take(self, start: int, token_ids: list[int]) -> int:
        """Goes on to other tokens; returns how many of them are there already, all but one at most."""
        known = 0
        if start == self.start:
            for before, now in zip(self.token_ids, token_ids[:-1], strict=False):
                if before != now:
                    break
                known += 1
        self.start, self.token_ids = start, list(token_ids)
        return known


class DraftModel:
    """Belongs to the thread of its runner."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        """
        Args:
            runner: Of the small model, with `MAX_CONTINUATIONS` times `blocks_of_continuation` blocks and contexts of
                `WINDOW + MAX_COUNT`.
            vocab_size: Of the large model; no token beyond is proposed.
        """
        self._runner = runner
        self._vocab_size = vocab_size
        count = blocks_of_continuation(runner.kv_tensors.block_size)
        self._free = [_Slot(range(index * count, (index + 1) * count)) for index in range(MAX_CONTINUATIONS)]
        self._slots: OrderedDict[int, _Slot] = OrderedDict()
        """By key, the one used longest ago first."""
        self._step = 0

    def propose(self, continuations: Sequence[Continuation]) -> list[list[int]]:
        """For each what may follow, at most `num_wanted` tokens; nothing where one asks for too much.

        Raises:
            WorkerError: The model cannot compute it; what was known of all is forgotten.
        """
        proposed: list[list[int]] = [[] for _ in continuations]
        try:
            rows = self._rows(continuations)
            while rows:
                rows = self._extend(continuations, rows, proposed)
        except Exception:
            self._free += self._slots.values()
            self._slots.clear()
            for slot in self._free:
                slot.token_ids = []
            raise
        return proposed

    def _rows(self, continuations: Sequence[Continuation]) -> list[tuple[int, _Slot, int]]:
        """Index, slot and known tokens of those that can be gone on with."""
        rows, left = [], MAX_PROPOSED_TOKENS
        for index, asked in enumerate(continuations[:MAX_CONTINUATIONS]):
            token_ids = asked.token_ids
            if not (0 < len(token_ids) <= WINDOW and 0 < asked.num_wanted <= MAX_COUNT):
                continue
            if not 0 <= min(token_ids) <= max(token_ids) < self._runner.spec.vocab_size:
                continue
            slot = self._slots.pop(asked.key, None)
            if slot is None:
                slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
                slot.token_ids = []
            self._slots[asked.key] = slot
            before = slot.start, slot.token_ids
            known = slot.take(asked.start, token_ids)
            if len(token_ids) - known > left:
                slot.start, slot.token_ids = before
                continue
            left -= len(token_ids) - known
            rows.append((index, slot, known))
        return rows

    def _extend(
        self, continuations: Sequence[Continuation], rows: list[tuple[int, _Slot, int]], proposed: list[list[int]]
    ) -> list[tuple[int, _Slot, int]]:
        """Goes on by one token each; returns those that go on further."""
        asked = [continuations[index] for index, _, _ in rows]
        known = np.array([known for _, _, known in rows], np.int32)
        lens = np.array([len(slot.token_ids) for _, slot, _ in rows], np.int32)
        positions = [each.start + int(length) for each, length in zip(asked, lens, strict=True)]
        blocks = np.stack([slot.blocks for _, slot, _ in rows])
        step = StepInput(
            step=self._step,
            token_ids=np.concatenate([np.array(slot.token_ids[known:], np.int32) for _, slot, known in rows]),
            query_lens=lens - known,
            num_computed=known,
            block_tables=blocks[:, : -(-int(lens.max()) // self._runner.kv_tensors.block_size)],
            block_epochs=np.zeros_like(blocks)[:, : -(-int(lens.max()) // self._runner.kv_tensors.block_size)],
            wanted=np.array(
                [(row, int(count) - 1, ResultKind.TOKEN) for row, count in enumerate(lens - known)], np.int32
            ),
            sampling=_sampling(asked, positions),
        )
        self._step += 1
        chosen = self._runner.execute(step).token_ids.tolist()
        further = []
        for (index, slot, _), token_id in zip(rows, chosen, strict=True):
            if not 0 <= token_id < self._vocab_size:
                continue
            proposed[index].append(token_id)
            if len(proposed[index]) < continuations[index].num_wanted:
                further.append((index, slot, len(slot.token_ids)))
                slot.token_ids.append(token_id)
        return further


def _sampling(asked: Sequence[Continuation], positions: Sequence[int]) -> SamplingInput:
    """As the requests are sampled, but for penalties, biases and forbidden tokens."""
    return SamplingInput.greedy(
        len(asked),
        temperature=np.array([each.temperature for each in asked], np.float32),
        top_k=np.array([each.top_k for each in asked], np.int32),
        top_p=np.array([each.top_p for each in asked], np.float32),
        min_p=np.array([each.min_p for each in asked], np.float32),
        seed=np.array([each.seed for each in asked], np.uint64),
        position=np.array(positions, np.int32),
    )
