"""What of a step its time depends on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class StepShape(NamedTuple):
    """Numbers of one step, each of which a cost model may have pieces over."""

    rows: int
    """Requests."""
    tokens: int
    """New tokens of all rows."""
    samples: int
    """Tokens that are chosen."""
    context: int
    """Keys that are read: of each row the tokens before the step and those of it."""
    pairs: int
    """Products of queries and keys in rows of more than one token."""
    moves: int
    """Blocks copied, moved out or moved in."""
    sent: int = 0
    """Tokens of other steps that are on their way to clients while it is computed."""
    read: float = 0
    """Requests that are read while it is computed."""

    @property
    def verifies_drafts(self) -> bool:
        """Whether more tokens are chosen than there are requests."""
        return self.samples > self.rows

    def beside(self, sent: int, read: float) -> StepShape:
        """The same step with other things done meanwhile."""
        return tuple.__new__(StepShape, (*self[:6], sent, read))  # half of what its own constructor takes


def shape_of_rows(
    query_lens: np.ndarray[tuple[int], np.dtype[np.int32]],
    num_computed: np.ndarray[tuple[int], np.dtype[np.int32]],
    num_samples: int,
    num_moves: int,
) -> StepShape:
    """The shape of a step of these rows.

    Args:
        query_lens: [B], int32, new tokens of each.
        num_computed: [B], int32, tokens in the cache before.
        num_samples: Tokens that are chosen.
        num_moves: Blocks.
    """
    queries, before = query_lens.astype(np.int64), num_computed.astype(np.int64)
    tokens = int(queries.sum())
    is_long = queries > 1
    pairs = (queries * before + queries * (queries + 1) // 2)[is_long].sum()
    return StepShape(len(queries), tokens, num_samples, int(before.sum()) + tokens, int(pairs), num_moves)
