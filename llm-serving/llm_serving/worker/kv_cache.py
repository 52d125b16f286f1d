"""The KV cache of a WorkAgent: one pair of block tensors per layer, a host pool, and moves of blocks between them."""

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


class BlockLocation(enum.StrEnum):
    """Memories that hold KV blocks."""

    CACHE = "cache"
    HOST = "host pool"
    TRANSFER = "transfer pool"


SOURCE_AND_TARGET: Final = {
    BlockMoveKind.COPY: (BlockLocation.CACHE, BlockLocation.CACHE),
    BlockMoveKind.SWAP_OUT: (BlockLocation.CACHE, BlockLocation.HOST),
    BlockMoveKind.SWAP_IN: (BlockLocation.HOST, BlockLocation.CACHE),
    BlockMoveKind.EXPORT: (BlockLocation.CACHE, BlockLocation.TRANSFER),
    BlockMoveKind.IMPORT: (BlockLocation.TRANSFER, BlockLocation.CACHE),
}
_SIZES: Final = {
    BlockLocation.CACHE: "num_blocks",
    BlockLocation.HOST: "num_swap_blocks",
    BlockLocation.TRANSFER: "num_transfer_blocks",
}


def check_block_moves(
    block_moves: Int32Array,
    num_blocks: int,
    num_swap_blocks: int,
    num_transfer_blocks: int = 0,
    *,
    exports: bool = False,
) -> None:
    """Check that every move stays inside cache, host pool and transfer pool; raise WorkerError otherwise.

    With `exports`, all moves must be of kind EXPORT; otherwise none may be.
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
    sizes = {
        BlockLocation.CACHE: num_blocks,
        BlockLocation.HOST: num_swap_blocks,
        BlockLocation.TRANSFER: num_transfer_blocks,
    }
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


def group_by_kind(block_moves: Int32Array) -> Iterator[tuple[BlockMoveKind, Int32Array]]:
    """Yield runs of consecutive moves of one kind: (kind, [n, 2] of source and target)."""
    if not len(block_moves):
        return
    kinds = block_moves[:, 0]
    for run in np.split(block_moves, np.flatnonzero(np.diff(kinds)) + 1):
        yield BlockMoveKind(run[0, 0]), run[:, 1:3]


@dataclass(frozen=True, slots=True)
class KVTensors:
    """KV tensors of all layers. They must live as long as the network that uses the same Parameters.

    Block i of the block manager is row i of every tensor, so a block can be copied as a whole; the layout inside a
    block is the backend's. The host pool holds blocks in the same layout and is not computed on.
    """

    backend: Backend
    layers: tuple[tuple[ms.Parameter, ms.Parameter], ...]  # (key, value) of each layer
    host_layers: tuple[tuple[Array, Array], ...]  # the same in plain memory, of `num_swap_blocks` blocks
    num_blocks: int
    num_swap_blocks: int
    block_size: int
    transfer: TransferMemory | None = None

    @property
    def block_bytes(self) -> int:
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
        """Allocate zeroed tensors; `int8`: keys and values are quantized to 8 bits.

        Raises:
            ConfigError: There are more KV slots than an int32 slot number can name.
            ModelError: The backend has no attention over 8-bit keys and values.
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
        """Move whole blocks of all layers, one move after the other. The moves passed `check_block_moves`."""
        for kind, pairs in group_by_kind(block_moves):
            sources, targets = map(self._layers_of, SOURCE_AND_TARGET[kind])
            for source, target in zip(chain(*sources), chain(*targets), strict=True):
                self.backend.copy_blocks(source, target, pairs)

    def _layers_of(self, memory: BlockLocation) -> Sequence[tuple[BlockMemory, BlockMemory]]:
        if memory is BlockLocation.CACHE:
            return self.layers
        if memory is BlockLocation.HOST:
            return self.host_layers
        assert self.transfer is not None
        return self.transfer.layers


class GraphOwnedCache(KVTensors):
    """KV caches inside a graph, which cannot be accessed from outside."""

    @classmethod
    def of(cls, backend: Backend, num_blocks: int, block_size: int) -> GraphOwnedCache:
        return cls(backend, (), (), num_blocks, 0, block_size)

    def move_blocks(self, block_moves: Int32Array) -> None:
        """Raise WorkerError if there are moves."""
        if len(block_moves):
            raise WorkerError(
                "with model_config.backend: ge caches lie inside a graph, which copies no blocks: "
                "n, best_of and beams are not served"
            )


def element_bytes(backend: Backend) -> int:
    """Return the size of an activation."""
    size: int = type_size_in_bytes(backend.activation_dtype)
    return size


def block_bytes(spec: ModelSpec, backend: Backend, block_size: int, *, int8: bool = False) -> int:
    """Return the size of a block in all layers, keys and values."""
    return block_size * spec.kv_bytes_per_token(element_bytes(backend), int8=int8)


def num_blocks_for(num_bytes: int, one: int, block_size: int) -> int:
    """Return how many blocks of `one` bytes fit into `num_bytes`; raise ConfigError if not even one fits."""
    if num_bytes < one:
        raise ConfigError(f"the KV cache must have room for one block of {one} bytes. Left: {num_bytes} bytes")
    return min(num_bytes // one, MAX_SLOTS // block_size)
