"""Checks of a step's reads and writes of state slots."""

from __future__ import annotations

import numpy as np

from llm_serving.core.step import STATE_BEFORE, Int32Array, StateAccess, StepInput
from llm_serving.errors import WorkerError
from llm_serving.worker.block_guard import BlockTags
from llm_serving.worker.model_inputs import all_in_range, any_true

NO_SLOT = -1
"""Stands for a slot in a state input: the row starts from a zero state, or the state after the token is not stored."""


class StateGuard:
    """Tags every slot with its allocation epoch and the number of tokens that its state covers.

    A row may read a slot only if the epochs match and the state covers exactly the row's computed tokens. So a bug in
    the master (a slot allocated twice, a skipped step, a wrong checkpoint) is detected before it causes wrong text.
    """

    def __init__(self, num_slots: int) -> None:
        self.tags = BlockTags.of_empty(num_slots)
        self._epochs, self._num_tokens = self.tags

    def check(self, step: StepInput) -> tuple[Int32Array, Int32Array]:
        """Check a step's state accesses, and tag the slots that it writes. Other indices of the step must be valid.

        Return the slot that each row reads, [B], and the slot for the state after each token, [T]; `NO_SLOT`: none.
        Raise WorkerError if a row reads a wrong state, or overwrites a state that another row reads.
        """
        accesses = step.states
        if accesses.ndim != 2 or accesses.shape[1] != len(StateAccess._fields):
            raise WorkerError(
                f"the array `states` must have the shape [N, {len(StateAccess._fields)}]. Given: {list(accesses.shape)}"
            )
        rows, tokens, slots, epochs = accesses.T
        if not (all_in_range(rows, step.num_rows) and all_in_range(slots, len(self._epochs))):
            rule = f"states must be of rows below {step.num_rows} and slots below {len(self._epochs)}"
            raise WorkerError(f"{rule}. Given: rows up to {rows.max()}, slots {slots.min()} to {slots.max()}")
        if any_true((tokens < STATE_BEFORE) | (tokens >= step.query_lens[rows])):
            raise WorkerError("a row may store states only after tokens that it computes")
        is_read = tokens == STATE_BEFORE
        state_in = np.full(step.num_rows, NO_SLOT, np.int32)
        state_in[rows[is_read]] = slots[is_read]
        if any_true((state_in == NO_SLOT) != (step.num_computed == 0)):
            raise WorkerError("a row must read a state if, and only if, it has computed tokens")
        self._check_reads(step, rows[is_read], slots[is_read], epochs[is_read])
        written, of_rows = slots[~is_read], rows[~is_read]
        if len(set(written.tolist())) != len(written):
            raise WorkerError("two tokens would store their states in one slot")
        if len(set(zip(rows.tolist(), tokens.tolist(), strict=True))) != len(rows):
            raise WorkerError("a row would read two slots, or store the state after one token in two slots")
        num_readers = np.bincount(slots[is_read], minlength=len(self._epochs))
        disturbs = num_readers[written] > (state_in[of_rows] == written)
        if any_true(disturbs):
            row, slot = of_rows[disturbs][0], written[disturbs][0]
            raise WorkerError(f"row {row} would overwrite slot {slot}, which another row reads")
        ends = np.cumsum(step.query_lens, dtype=np.int32)
        state_out = np.full(step.num_tokens, NO_SLOT, np.int32)
        stored = tokens[~is_read]
        state_out[(ends - step.query_lens)[of_rows] + stored] = written
        self._epochs[written] = epochs[~is_read]
        self._num_tokens[written] = step.num_computed[of_rows] + stored + 1
        return state_in, state_out

    def _check_reads(self, step: StepInput, rows: Int32Array, slots: Int32Array, epochs: Int32Array) -> None:
        foreign = self._epochs[slots] != epochs
        if any_true(foreign):
            row, slot = rows[foreign][0], slots[foreign][0]
            raise WorkerError(f"row {row} would read slot {slot}, which another owner has written")
        others = self._num_tokens[slots] != step.num_computed[rows]
        if any_true(others):
            row, slot = rows[others][0], slots[others][0]
            found = self._num_tokens[slot]
            raise WorkerError(f"row {row} would read slot {slot}, whose state covers {found} tokens, not the row's")
