"""Converts a step into the arguments of a network, and checks all indices, so that kernels need no checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import NO_BLOCK, Int32Array, ResultKind, ResultToken, StepInput
from llm_serving.core.window import ONE_GROUP, CacheGroups
from llm_serving.errors import WorkerError


def all_true(mask: NDArray[np.bool_]) -> bool:
    """Return whether a mask is true everywhere. A search in its bytes is faster than a NumPy reduction."""
    return b"\0" not in mask.tobytes()


def any_true(mask: NDArray[np.bool_]) -> bool:
    return b"\1" in mask.tobytes()


def all_zero(numbers: NDArray[Any]) -> bool:
    return not numbers.tobytes().strip(b"\0")


def all_in_range(values: Int32Array, end: int) -> bool:
    """Return whether all values are from 0 to `end` - 1, by one comparison as unsigned numbers."""
    return int(np.maximum.reduce(values.view(np.uint32), axis=None, initial=0)) < end


def is_partition(offsets: Int32Array, num_entries: int, num_parts: int) -> bool:
    """Return whether `offsets` [num_parts + 1] start at 0, never decrease and end at `num_entries`."""
    if len(offsets) != num_parts + 1:
        return False
    if not num_entries:
        return all_zero(offsets)
    return offsets.item(0) == 0 and offsets.item(-1) == num_entries and all_true(offsets[1:] >= offsets[:-1])


def stack_rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    rows: NDArray[Any] = np.concatenate(arrays).reshape(len(arrays), -1)
    return rows


NO_TOKENS: Int32Array = np.empty(0, np.int32)

# Replaces a reference to a failed sample: the request ends with that failure, so any valid id will do.
_PLACEHOLDER_TOKEN = 0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    vocab_size: int
    max_positions: int
    num_blocks: int
    block_size: int
    groups: CacheGroups = ONE_GROUP
    group_parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The arguments of a network, in the order of `step_inputs.STEP_INPUTS`, all int32 and C-contiguous."""

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T], index of the token in its own sequence
    slot_mapping: Int32Array  # [G * T], for each group of layers block * block_size + offset of each token's key
    block_tables: Int32Array  # [G * B, W], block ids times the parts of the group; 0, never read, if there is no block
    query_lens: Int32Array  # [B]
    context_lens: Int32Array  # [B], tokens attended to: those in the cache and those of this step
    sample_indices: Int32Array  # [R], the tokens that give a result, in the order of `StepInput.result_tokens`
    states: tuple[Int32Array, ...] = ()
    """Arrays of `lowering.step_inputs.STATE_INPUTS`. Empty if the model has no recurrent states."""
    adapter_slots: tuple[Int32Array, ...] = ()
    """Array of `lowering.step_inputs.ADAPTER_INPUT`. Empty if the network has no adapter slots."""

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def selected_indices(self) -> Int32Array:
        """Indices of the tokens whose hidden states a network returns. At least one, because kernels need one."""
        return self.sample_indices if len(self.sample_indices) else np.zeros(1, np.int32)

    @property
    def are_whole_prompts(self) -> bool:
        return bool((self.context_lens == self.query_lens).all())

    def padded_to(self, num_rows: int) -> ModelInputs:
        """Return a copy with empty rows added up to `num_rows`, the number of rows of a graph."""
        missing = num_rows - len(self.query_lens)
        return replace(
            self,
            block_tables=np.pad(self.block_tables, ((0, missing), (0, 0))),
            query_lens=np.pad(self.query_lens, (0, missing)),
            context_lens=np.pad(self.context_lens, (0, missing)),
        )

    def with_token_rows(self, multiple: int) -> ModelInputs:
        """Return a copy in which each token is a row, with empty rows added up to a multiple of `multiple`."""
        rows = np.repeat(np.arange(self.num_rows, dtype=np.int32), self.query_lens)
        of_tokens = replace(
            self,
            block_tables=self.block_tables[rows],
            query_lens=np.ones(len(rows), np.int32),
            context_lens=self.positions + np.int32(1),
        )
        return of_tokens.padded_to(-(-len(rows) // multiple) * multiple)

    def arrays(self) -> tuple[Int32Array, ...]:
        return (
            self.token_ids,
            self.positions,
            self.slot_mapping,
            self.block_tables,
            self.query_lens,
            self.context_lens,
            self.selected_indices,
            *self.states,
            *self.adapter_slots,
        )


def resolve_token_ids(token_ids: Int32Array, previous: Int32Array) -> Int32Array:
    """Replace each token id -1 - j, which refers to sample j of the previous step, by `previous[j]`. If that sample
    failed (-1), use a placeholder. Raise WorkerError if there was no sample j.
    """
    if not token_ids.size or int(token_ids.min()) >= 0:
        return token_ids
    references = np.flatnonzero(token_ids < 0)
    samples = -1 - token_ids[references]
    if samples.max() >= len(previous):
        raise WorkerError(
            f"token_ids refers to sample {samples.max()} of the previous step, which chose {len(previous)} tokens"
        )
    resolved = token_ids.copy()
    resolved[references] = np.where(previous[samples] < 0, _PLACEHOLDER_TOKEN, previous[samples])
    return resolved


def build_model_inputs(step: StepInput, previous: Int32Array, limits: ModelLimits) -> ModelInputs:
    """Return a network's arguments. `previous`: tokens of the previous step. Raise WorkerError for an invalid step."""
    num_tokens, num_rows = step.num_tokens, step.num_rows
    query_lens, num_computed, block_tables = step.query_lens, step.num_computed, step.block_tables
    _check_rows(step, limits)
    token_ids = resolve_token_ids(step.token_ids, previous)
    if int(token_ids.max()) >= limits.vocab_size:
        raise WorkerError(f"token_ids must be below {limits.vocab_size}. Given: {token_ids.max()}")
    context_lens = num_computed + query_lens
    longest = int(context_lens.max())
    if longest > limits.max_positions:
        raise WorkerError(f"a row must have at most {limits.max_positions} tokens. Given: {longest}")
    block_size = limits.block_size
    if longest > block_tables.shape[1] * block_size:
        raise WorkerError(
            f"block_tables has {block_tables.shape[1]} columns of {block_size} tokens, "
            f"too few for a row of {longest} tokens"
        )
    if not all_in_range(block_tables, limits.num_blocks):
        block_tables = _without_gaps(step, limits)

    if num_tokens == num_rows:  # pure decode step: one token per row
        rows = first_tokens = np.arange(num_rows, dtype=np.int32)
        positions = num_computed
    else:
        row_ends = np.cumsum(query_lens, dtype=np.int32)
        rows = np.repeat(np.arange(num_rows, dtype=np.int32), query_lens)
        # Token t of row b has position num_computed[b] + (t - first token of b).
        positions = np.arange(num_tokens, dtype=np.int32) + (context_lens - row_ends)[rows]
        first_tokens = row_ends - query_lens
    logical_blocks, offsets = np.divmod(positions, np.int32(block_size))
    num_groups = len(limits.groups.windows)
    of_groups = [block_tables] if num_groups == 1 else np.split(block_tables, num_groups)
    if max(limits.group_parts, default=1) > 1:
        of_groups = [tables * np.int32(parts) for tables, parts in zip(of_groups, limits.group_parts, strict=True)]
        block_tables = np.concatenate(of_groups)
    slots = [tables[rows, logical_blocks] * np.int32(block_size) + offsets for tables in of_groups]
    return ModelInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots[0] if len(slots) == 1 else np.concatenate(slots),
        block_tables=block_tables,
        query_lens=query_lens,
        context_lens=context_lens,
        sample_indices=first_tokens[step.result_tokens[:, 0]] + step.result_tokens[:, 1],
    )


def first_visible_blocks(step: StepInput, block_size: int, groups: CacheGroups) -> Int32Array:
    """Return the block table column at which the attention of each row's first token begins, [G * B]. It differs
    between the G groups of layers, because each group has its own attention window.
    """
    firsts = []
    for window in groups.windows:
        first = np.zeros(step.num_rows, np.int32)
        if window.is_chunked:
            first = step.num_computed // np.int32(window.num_tokens) * np.int32(window.num_tokens)
        elif window.is_sliding:
            first = np.maximum(step.num_computed + np.int32(1 - window.num_tokens), 0)
        firsts.append(first // np.int32(block_size))
    return np.concatenate(firsts)


def _without_gaps(step: StepInput, limits: ModelLimits) -> Int32Array:
    """Return the block tables, with id 0 for blocks that a window has passed. Raise WorkerError for invalid ids."""
    columns = np.arange(step.block_tables.shape[1], dtype=np.int32)
    behind = columns < first_visible_blocks(step, limits.block_size, limits.groups)[:, None]
    block_tables = np.where(behind & (step.block_tables == NO_BLOCK), np.int32(0), step.block_tables)
    if not all_in_range(block_tables, limits.num_blocks):
        raise WorkerError(
            f"block_tables must hold ids from 0 to {limits.num_blocks - 1}. "
            f"Given: {block_tables.min()} to {block_tables.max()}"
        )
    return block_tables


def _check_rows(step: StepInput, limits: ModelLimits) -> None:
    num_rows = step.num_rows
    if not num_rows:
        raise WorkerError("a step must have at least one row")
    num_groups = len(limits.groups.windows)
    if len(step.num_computed) != num_rows or len(step.block_tables) != num_groups * num_rows:
        raise WorkerError(
            f"num_computed must have one entry for each of {num_rows} rows, and block_tables {num_groups} for each. "
            f"Given: num_computed {len(step.num_computed)}, block_tables {len(step.block_tables)}"
        )
    if step.block_epochs.shape != step.block_tables.shape:
        raise WorkerError(
            f"block_epochs must be of the shape {step.block_tables.shape} of block_tables. "
            f"Given: {step.block_epochs.shape}"
        )
    if int(step.query_lens.min()) < 1 or int(step.query_lens.sum()) != step.num_tokens:
        raise WorkerError(
            f"query_lens must be at least 1 each and {step.num_tokens} together. "
            f"Given: least {step.query_lens.min()}, sum {step.query_lens.sum()}"
        )
    if not all_in_range(step.num_computed, limits.max_positions + 1):
        raise WorkerError(
            f"num_computed must be from 0 to {limits.max_positions}. "
            f"Given: {step.num_computed.min()} to {step.num_computed.max()}"
        )
    _check_result_tokens(step)


def _check_result_tokens(step: StepInput) -> None:
    result_tokens = step.result_tokens
    if result_tokens.ndim != 2 or result_tokens.shape[1] != len(ResultToken._fields):
        raise WorkerError(
            f"result_tokens must be an array of {', '.join(ResultToken._fields)}. "
            f"Given: the shape {result_tokens.shape}"
        )
    given = step.sampling.num_samples, step.scoring.num_results
    _check_rows_and_counts(step.query_lens.tobytes(), result_tokens.tobytes(), given)


@lru_cache(maxsize=8)  # decode steps of the same requests ask for results of the same rows
def _check_rows_and_counts(query_lens_bytes: bytes, result_bytes: bytes, given: tuple[int, int]) -> None:
    query_lens = np.frombuffer(query_lens_bytes, np.int32)
    result_tokens = np.frombuffer(result_bytes, np.int32).reshape(-1, len(ResultToken._fields))
    num_rows = len(query_lens)
    rows, tokens, kinds = result_tokens.T
    if not all_in_range(rows, num_rows):
        raise WorkerError(f"result_tokens must have rows 0 to {num_rows - 1}. Given: {rows.min()} to {rows.max()}")
    # Read as unsigned numbers, negative numbers are the largest.
    if not all_true(tokens.view(np.uint32) < query_lens[rows]):
        raise WorkerError("the token positions in result_tokens must be less than `query_lens` of their rows")
    if not all_in_range(kinds, len(ResultKind)):
        raise WorkerError(
            f"result_tokens must have kinds 0 to {len(ResultKind) - 1}. Given: {kinds.min()} to {kinds.max()}"
        )
    if len(result_tokens) > 1:
        order = (kinds.astype(np.int64) * num_rows + rows) * int(query_lens.sum()) + tokens
        if (order[1:] <= order[:-1]).any():
            raise WorkerError("result_tokens must ascend by kind, row and token")
    counts = np.bincount(kinds, minlength=len(ResultKind)).tolist()
    if (counts[0], counts[1]) != given:
        raise WorkerError(
            f"sampling must describe {counts[0]} results and scoring {counts[1]}, as many as result_tokens has. "
            f"Given: sampling {given[0]}, scoring {given[1]}"
        )
