"""Hidden states of the newest tokens, which the layer for multi-token prediction reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from llm_serving.backends.base import Array
from llm_serving.backends.parameters import to_model_dtype
from llm_serving.core.step import DRAFT_WINDOW, Float32Array, Int32Array
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.worker.block_guard import SOURCE_AND_TARGET, BlockLocation

_INTO_CACHE: Final = [kind for kind, (_, target) in SOURCE_AND_TARGET.items() if target is BlockLocation.CACHE]
_NO_ENTRY: Final = -1


def newest_tokens(query_lens: Int32Array) -> Int32Array:
    """Return the ascending indices of the last `DRAFT_WINDOW` tokens of each row of a step."""
    if int(query_lens.max()) <= DRAFT_WINDOW:
        return np.arange(query_lens.sum(), dtype=np.int32)
    ends = np.cumsum(query_lens, dtype=np.int32)
    rows = zip(query_lens.tolist(), ends.tolist(), strict=True)
    return np.concatenate([np.arange(end - min(count, DRAFT_WINDOW), end, dtype=np.int32) for count, end in rows])


class HiddenStates:
    """The last layer's hidden states of the tokens in the `num_entries` most recently used KV blocks."""

    def __init__(self, num_entries: int, num_blocks: int, block_size: int, hidden: int, dtype: str) -> None:
        self._block_size, self._dtype = block_size, dtype
        self._states: Array = to_model_dtype(np.zeros((num_entries, block_size, hidden), np.float32), dtype)
        self._is_kept = np.zeros((num_entries, block_size), np.bool_)
        self._entry_of = np.full(num_blocks, _NO_ENTRY, np.int32)
        self._block_of = np.full(num_entries, -1, np.int32)
        self._last_use = np.zeros(num_entries, np.int64)
        self._num_uses = 0

    def drop(self, block_moves: Int32Array, slots: Int32Array) -> None:
        """Drop the states of tokens whose keys a step overwrites: by `block_moves` (copies of blocks) or at `slots`."""
        if len(block_moves):
            entries = self._entry_of[block_moves[np.isin(block_moves[:, 0], _INTO_CACHE), 2]]
            self._is_kept[entries[entries != _NO_ENTRY]] = False
        blocks, offsets = np.divmod(slots, np.int32(self._block_size))
        entries = self._entry_of[blocks]
        found = entries != _NO_ENTRY
        self._is_kept[entries[found], offsets[found]] = False

    def keep(self, slots: Int32Array, states: Float32Array) -> None:
        """Keep the hidden states [N, H] of the N tokens whose keys a step writes to `slots`."""
        self._num_uses += 1
        blocks, offsets = np.divmod(slots, np.int32(self._block_size))
        known = self._entry_of[blocks]
        self._last_use[known[known != _NO_ENTRY]] = self._num_uses
        for block in np.unique(blocks[known == _NO_ENTRY]).tolist():
            self._assign(block)
        entries = self._entry_of[blocks]
        found = entries != _NO_ENTRY  # a step may have more blocks than there are entries
        self._states[entries[found], offsets[found]] = to_model_dtype(states[found], self._dtype)
        self._is_kept[entries[found], offsets[found]] = True

    def read(self, block_ids: Sequence[int], first: int, count: int) -> Float32Array:
        """Return the states [n, H] of the last n of `count` tokens, where n is the largest number without a missing
        state. The first of the `count` tokens is at offset `first` of the first block.
        """
        columns, offsets = np.divmod(np.arange(first, first + count), self._block_size)
        entries = self._entry_of[np.array(block_ids, np.int32)[columns]]
        missing = np.flatnonzero((entries == _NO_ENTRY) | ~self._is_kept[entries, offsets])
        begin = int(missing[-1]) + 1 if len(missing) else 0
        self._num_uses += 1
        self._last_use[entries[begin:]] = self._num_uses
        return to_float32(self._states[entries[begin:], offsets[begin:]])

    def _assign(self, block: int) -> None:
        entry = int(np.argmin(self._last_use))
        if (before := int(self._block_of[entry])) >= 0:
            self._entry_of[before] = _NO_ENTRY
        self._entry_of[block], self._block_of[entry] = entry, block
        self._is_kept[entry], self._last_use[entry] = False, self._num_uses
