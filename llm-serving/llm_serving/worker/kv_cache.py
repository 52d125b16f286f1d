"""The key/value cache of a WorkAgent: one pair of tensors a layer, cut into blocks, and a host pool beside it.

The block moves of a step: what may be asked for, and which of them belong together.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import mindspore as ms
import numpy as np
from mindspore.common.dtype import type_size_in_bytes

from llm_serving.backends.base import Array, Backend, BlockMemory
from llm_serving.backends.parameters import bytes_of_block, host_blocks
from llm_serving.core.step import BlockMove, BlockMoveKind, Int32Array
from llm_serving.errors import ConfigError, WorkerError
from llm_serving.models.memory import MAX_SLOTS
from llm_serving.models.spec import ModelSpec
from llm_serving.worker.kv_transfer import TransferMemory


class Memory(enum.StrEnum):
    """Where blocks lie."""

    CACHE = "cache"
    HOST = "host pool"
    TRANSFER = "transfer pool"


SOURCE_AND_TARGET: Final = {
    BlockMoveKind.COPY: (Memory.CACHE, Memory.CACHE),
    BlockMoveKind.SWAP_OUT: (Memory.CACHE, Memory.HOST),
    BlockMoveKind.SWAP_IN: (Memory.HOST, Memory.CACHE),
    BlockMoveKind.EXPORT: (Memory.CACHE, Memory.TRANSFER),
    BlockMoveKind.IMPORT: (Memory.TRANSFER, Memory.CACHE),
}
_SIZES: Final = {
    Memory.CACHE: "num_blocks",
    Memory.HOST: "num_swap_blocks",
    Memory.TRANSFER: "num_transfer_blocks",
}


def check_block_moves(
    block_moves: Int32Array,
    num_blocks: int,
    num_swap_blocks: int,
    num_transfer_blocks: int = 0,
    *,
    exports: bool = False,
) -> None:
    """Makes sure that every move stays inside cache, host pool and transfer pool.

    With `exports`, all must be of the kind EXPORT; otherwise none may be.

    Raises:
        WorkerError: One does not, or is of no known kind.
    """
    if block_moves.ndim != 2 or block_moves.shape[1] != len(BlockMove._fields):
        raise WorkerError(f"block_moves must be [N, {len(BlockMove._fields)}]. Given: {list(block_moves.shape)}")
    if not len(block_moves):
        return
    kinds = block_moves[:, 0]
    allowed = [kind for kind in BlockMoveKind if (kind is BlockMoveKind.EXPORT) == exports]
    if (unknown := ~np.isin(kinds, allowed)).any():
        known = ", ".join(f"{kind.value} {kind.name}" for kind in allowed)
        raise WorkerError(f"block_moves must be of the kinds {known}. Given: {kinds[unknown][0]}")
    sizes = {Memory.CACHE: num_blocks, Memory.HOST: num_swap_blocks, Memory.TRANSFER: num_transfer_blocks}
    for kind in sorted(set(map(BlockMoveKind, kinds.tolist()))):
        moves = block_moves[kinds == kind]
        for column, end, memory in zip((1, 2), ("from", "to"), SOURCE_AND_TARGET[kind], strict=True):
            ids, size = moves[:, column], sizes[memory]
            outside = (ids < 0) | (ids >= size)
            if outside.any():
                raise WorkerError(
                    f"block_moves: {kind.name} {end} a block of the {memory} must name one below `{_SIZES[memory]}` "
                    f"{size}. Given: {ids[outside][0]}"
                )


def runs(block_moves: Int32Array) -> Iterator[tuple[BlockMoveKind, Int32Array]]:
    """Neighbours of one kind, in the order given: (kind, [n, 2] of source and target)."""
    if not len(block_moves):
        return
    kinds = block_moves[:, 0]
    for run in np.split(block_moves, np.flatnonzero(np.diff(kinds)) + 1):
        yield BlockMoveKind(run[0, 0]), run[:, 1:3]


@dataclass(frozen=True, slots=True)
class KVTensors:
    """Lives as long as the network that holds the same Parameters.

    Block i of the block manager is row i of every tensor, so a block can be copied as a whole; the order of elements
    inside a block belongs to the backend. The host pool holds whole blocks in the same order and is never computed on.
    """

    backend: Backend
    layers: tuple[tuple[ms.Parameter, ms.Parameter], ...]  # (key, value) of each layer
    host_layers: tuple[tuple[Array, Array], ...]  # the same in plain memory, of `num_swap_blocks` blocks
    num_blocks: int
    num_swap_blocks: int
    block_size: int
    transfer: TransferMemory | None = None
    """By which blocks are handed over; None: none are."""

    @property
    def block_bytes(self) -> int:
        """Of a block, all layers."""
        return sum(bytes_of_block(cache) for layer in self.layers for cache in layer)

    @property
    def num_transfer_blocks(self) -> int:
        return 0 if self.transfer is None else self.transfer.num_blocks

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        backend: Backend,
        num_blocks: int,
        block_size: int,
        num_swap_blocks: int = 0,
        *,
        int8: bool = False,
    ) -> KVTensors:
        """Zeroed tensors for `num_blocks` blocks of `block_size` tokens, and a host pool of `num_swap_blocks`.

        Args:
            spec: The model.
            backend: Makes the tensors.
            num_blocks: Of the cache.
            block_size: Tokens of a block.
            num_swap_blocks: Of the host pool.
            int8: Whether keys and values are stored in 8 bits with a scale for each head and token.

        Raises:
            ConfigError: More slots than a slot number can name.
            ModelError: The backend does not attend to keys and values in 8 bits.
        """
        if num_blocks * block_size > MAX_SLOTS:
            raise ConfigError(
                f"`num_blocks` times `block_size` must be at most {MAX_SLOTS}. Given: {num_blocks} x {block_size}"
            )
        allocate = backend.int8_kv_cache if int8 else backend.kv_cache
        layers = tuple(
            allocate(num_blocks, block_size, cache, f"kv_cache.{index}") for index, cache in enumerate(spec.caches)
        )
        host_layers = tuple(
            (host_blocks(keys, num_swap_blocks), host_blocks(values, num_swap_blocks)) for keys, values in layers
        )
        return cls(backend, layers, host_layers, num_blocks, num_swap_blocks, block_size)

    def move_blocks(self, block_moves: Int32Array) -> None:
        """Moves whole blocks of all layers, one move after the other.

        Args:
            block_moves: [N, 6] as `StepInput.block_moves`, checked by `check_block_moves`: ids are not looked at again.
        """
        for kind, pairs in runs(block_moves):
            sources, targets = map(self._layers_of, SOURCE_AND_TARGET[kind])
            for source, target in zip(chain(*sources), chain(*targets), strict=True):
                self.backend.copy_blocks(source, target, pairs)

    def _layers_of(self, memory: Memory) -> Sequence[tuple[BlockMemory, BlockMemory]]:
        if memory is Memory.CACHE:
            return self.layers
        if memory is Memory.HOST:
            return self.host_layers
        assert self.transfer is not None
        return self.transfer.layers


class CachesOfGraph(KVTensors):
    """Caches that lie inside a graph, out of everybody's reach."""

    @classmethod
    def of(cls, backend: Backend, num_blocks: int, block_size: int) -> CachesOfGraph:
        """Those of a graph that was made for so many blocks."""
        return cls(backend, (), (), num_blocks, 0, block_size)

    def move_blocks(self, block_moves: Int32Array) -> None:
        """Moves nothing.

        Raises:
            WorkerError: Something is to be moved.
        """
        if len(block_moves):
            raise WorkerError(
                "with model_config.backend: ge caches lie inside a graph, which copies no blocks: "
                "n, best_of and beams are not served"
            )


def element_bytes(backend: Backend) -> int:
    """Bytes of a number that is computed with."""
    size: int = type_size_in_bytes(backend.activation_dtype)
    return size


def block_bytes(spec: ModelSpec, backend: Backend, block_size: int, *, int8: bool = False) -> int:
    """Bytes one block takes over all layers, keys and values; `int8`: stored in 8 bits."""
    return block_size * spec.kv_bytes_per_token(element_bytes(backend), int8=int8)


def num_blocks_for(num_bytes: int, one: int, block_size: int) -> int:
    """How many blocks of `one` bytes fit into `num_bytes`.

    Raises:
        ConfigError: Not even one.
    """
    if num_bytes < one:
        raise ConfigError(f"the KV cache must have room for one block of {one} bytes. Left: {num_bytes} bytes")
    return min(num_bytes // one, MAX_SLOTS // block_size)
