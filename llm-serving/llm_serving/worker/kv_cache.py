"""The KV cache of a WorkAgent: device tensors, host pool, transfer pool (for other WorkAgents), and block copies."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import mindspore as ms
import numpy as np
from mindspore.common.dtype import type_size_in_bytes

from llm_serving.backends.base import Array, Backend, BlockMemory
from llm_serving.backends.parameters import bytes_of_block, clear_cache, host_blocks, parameter_over, storage_dtype
from llm_serving.core.process import release_pages
from llm_serving.core.step import BlockMoveKind, Int32Array
from llm_serving.errors import ConfigError, WorkerError
from llm_serving.models.memory import MAX_SLOTS
from llm_serving.models.spec import ModelSpec
from llm_serving.network.caches import CacheView
from llm_serving.transport.shared_memory import MAX_TOKENS_PER_BLOCK
from llm_serving.worker.block_guard import SOURCE_AND_TARGET, BlockLocation

_PAGE = 4096
_MAX_EPOCH = 2**31 - 1


def group_by_kind(block_moves: Int32Array) -> Iterator[tuple[BlockMoveKind, Int32Array]]:
    """Split block moves into runs of one kind, such as SWAP_IN. Yield (kind, [n, 2] of source and target block)."""
    if not len(block_moves):
        return
    kinds = block_moves[:, 0]
    for run in np.split(block_moves, np.flatnonzero(np.diff(kinds)) + 1):
        yield BlockMoveKind(run[0, 0]), run[:, 1:3]


class TransferMemory:
    """A pool of KV blocks in an anonymous file that the master created, for transfers between WorkAgents.

    All WorkAgents of a machine inherit one file; the first one that maps it sets its size. To or from a WorkAgent on
    another machine, the master copies blocks by `read` and `write`. The layout is the same on all machines:

        | epoch, tokens written: int32 [num_blocks, 2] | keys of layer 0 [num_blocks, ...] | values of layer 0 | ...

    The master decides which WorkAgent writes a block, and when. A block's epoch is the number of its allocation.
    Readers check it to detect a block that was allocated again.
    """

    def __init__(self, fd: int, num_blocks: int, layers: Sequence[tuple[ms.Parameter, ms.Parameter]]) -> None:
        """Map the file `fd`, which the caller keeps open, for blocks with the shapes of `layers`."""
        self.num_blocks = num_blocks
        caches = list(chain(*layers))
        offset = _whole_pages(8 * num_blocks)
        length = offset + sum(_whole_pages(num_blocks * bytes_of_block(cache)) for cache in caches)
        os.ftruncate(fd, length)
        self._memory = memory = mmap.mmap(fd, length)
        tags: Int32Array = np.frombuffer(memory, np.int32, 2 * num_blocks).reshape(num_blocks, 2)
        self.epochs: Int32Array = tags[:, 0]
        self.num_written: Int32Array = tags[:, 1]
        self.arrays: list[Array] = []
        for cache in caches:
            self.arrays.append(np.ndarray((num_blocks, *cache.shape[1:]), storage_dtype(cache), memory, offset))
            offset += _whole_pages(self.arrays[-1].nbytes)
        self.layers = tuple(zip(self.arrays[::2], self.arrays[1::2], strict=True))

    @property
    def block_bytes(self) -> int:
        return sum(array[0].nbytes for array in self.arrays)

    def read(self, block_ids: Sequence[int], epochs: Sequence[int]) -> tuple[list[int], bytes]:
        """Return the number of tokens per block, and contents. Raise WorkerError for a missing block or wrong epoch."""
        ids = self._ids(block_ids, epochs)
        num_written = self.num_written[ids].tolist()
        self._check_owners(ids, epochs)
        content = b"".join([array[ids].tobytes() for array in self.arrays])
        self._check_owners(ids, epochs)
        return num_written, content

    def write(
        self, block_ids: Sequence[int], epochs: Sequence[int], num_written: Sequence[int], content: bytes
    ) -> None:
        """Write contents from `read`. Meanwhile the blocks are unreadable. Raise WorkerError for invalid arguments."""
        ids = self._ids(block_ids, epochs)
        if (len(num_written), len(content)) != (len(ids), len(ids) * self.block_bytes):
            rule = f"must come with {len(ids) * self.block_bytes} bytes, and a number of tokens for each"
            found = f"{len(content)} bytes, {len(num_written)} numbers of tokens"
            raise WorkerError(f"{len(ids)} blocks {rule}. Given: {found}")
        if not all(0 < each <= MAX_TOKENS_PER_BLOCK for each in num_written) or max(epochs) > _MAX_EPOCH:
            rule = f"blocks must have 1 to {MAX_TOKENS_PER_BLOCK} tokens each and epochs up to {_MAX_EPOCH}"
            raise WorkerError(f"{rule}. Given: tokens {list(num_written)}, epochs {list(epochs)}")
        self.num_written[ids] = 0
        offset = 0
        for array in self.arrays:
            shape = len(ids), *array.shape[1:]
            given = np.frombuffer(content, array.dtype, math.prod(shape), offset)
            array[ids] = given.reshape(shape)
            offset += given.nbytes
        self.epochs[ids] = epochs
        self.num_written[ids] = num_written

    def _ids(self, block_ids: Sequence[int], epochs: Sequence[int]) -> list[int]:
        ids = list(block_ids)
        if not ids or len(set(ids)) != len(ids) or len(epochs) != len(ids):
            rule = "each block of the transfer pool must be given once, with its epoch"
            raise WorkerError(f"{rule}. Given: blocks {ids}, epochs {list(epochs)}")
        if not 0 <= min(ids) <= max(ids) < self.num_blocks:
            raise WorkerError(f"blocks of the transfer pool must be from 0 to {self.num_blocks - 1}. Given: {ids}")
        return ids

    def _check_owners(self, ids: list[int], epochs: Sequence[int]) -> None:
        others = (self.epochs[ids] != epochs) | (self.num_written[ids] <= 0)
        if others.any():
            index = int(np.flatnonzero(others)[0])
            raise WorkerError(
                f"block {ids[index]} of the transfer pool does not hold the contents of epoch {epochs[index]}"
            )


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


@dataclass(frozen=True, slots=True)
class KVTensors:
    """KV tensors of all layers, which must exist as long as a network uses their Parameters. Block i of the block
    manager is row i of every tensor, so whole blocks can be copied. The host pool has the same layout.
    """

    backend: Backend
    layers: tuple[tuple[ms.Parameter, ms.Parameter], ...]  # (key, value) of each layer
    host_layers: tuple[tuple[Array, Array], ...]  # the same in plain memory, of `num_swap_blocks` blocks
    num_blocks: int
    num_swap_blocks: int
    block_size: int
    transfer: TransferMemory | None = None
    states: tuple[ms.Parameter, ...] = ()  # of each operation that keeps states, [num_state_slots, ...]
    views: tuple[tuple[ms.Parameter, ms.Parameter], ...] = ()  # of `CacheLayout.views`, in the memory of `layers`

    @property
    def block_bytes(self) -> int:
        return sum(map(bytes_of_block, chain(*self.layers)))

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        backend: Backend,
        num_blocks: int,
        block_size: int,
        num_swap_blocks: int = 0,
        *,
        num_state_slots: int = 0,
        int8: bool = False,
    ) -> KVTensors:
        """Allocate zeroed tensors. Raise ConfigError for too many KV slots, ModelError if int8 is not supported."""
        if num_blocks * block_size > (most := MAX_SLOTS // spec.layout.max_parts):
            raise ConfigError(
                f"`num_blocks` times `block_size` must be at most {most}. Given: {num_blocks} x {block_size}"
            )
        allocate = backend.int8_kv_cache if int8 else backend.kv_cache
        layers = tuple(
            allocate(num_blocks, block_size, cache, f"kv_cache.{index}") for index, cache in enumerate(spec.caches)
        )
        host_layers = tuple(
            (host_blocks(keys, num_swap_blocks), host_blocks(values, num_swap_blocks)) for keys, values in layers
        )
        states = tuple(
            backend.states(num_state_slots, state, f"state.{index}") for index, state in enumerate(spec.states)
        )
        views = tuple(_view(layers[each.tensors], each, num_blocks, block_size) for each in spec.layout.views)
        return cls(backend, layers, host_layers, num_blocks, num_swap_blocks, block_size, states=states, views=views)

    def clear(self) -> None:
        """Return the memory pages of all blocks to the operating system. Later accesses read zeros."""
        for cache in chain(*self.layers):
            clear_cache(cache)
        for blocks in chain(*self.host_layers):
            release_pages(blocks.ctypes.data, blocks.nbytes)

    def move_blocks(self, block_moves: Int32Array) -> None:
        """Execute moves of whole blocks, in all layers and in the given order. Call `BlockGuard.check_ids` before."""
        for kind, pairs in group_by_kind(block_moves):
            if kind in (BlockMoveKind.EXPORT_STATE, BlockMoveKind.IMPORT_STATE):
                self._move_states(kind, pairs)
                continue
            sources, targets = map(self._layers_of, SOURCE_AND_TARGET[kind])
            for source, target in zip(chain(*sources), chain(*targets), strict=True):
                self.backend.copy_blocks(source, target, pairs)

    def _move_states(self, kind: BlockMoveKind, pairs: Int32Array) -> None:
        assert self.transfer is not None
        exports = kind is BlockMoveKind.EXPORT_STATE
        slots, blocks = (pairs[:, 0], pairs[:, 1]) if exports else (pairs[:, 1], pairs[:, 0])
        for slot in dict.fromkeys(slots.tolist()):
            states = [_bytes_of(each.storage[slot]) for each in self.states]
            memory = [
                _bytes_of(array[block]) for block in blocks[slots == slot].tolist() for array in self.transfer.arrays
            ]
            _copy_bytes(states, memory) if exports else _copy_bytes(memory, states)

    def _layers_of(self, memory: BlockLocation) -> Sequence[tuple[BlockMemory, BlockMemory]]:
        if memory is BlockLocation.CACHE:
            return self.layers
        if memory is BlockLocation.HOST:
            return self.host_layers
        assert self.transfer is not None
        return self.transfer.layers


def _view(
    pair: tuple[ms.Parameter, ms.Parameter], view: CacheView, num_blocks: int, block_size: int
) -> tuple[ms.Parameter, ms.Parameter]:
    """Return the key and value tensors of a layer with smaller blocks, in the memory of `pair`. A row of `pair` holds n
    such blocks. The tensors begin at part `view.part` of row 0, so their block n * i is this part of row i. The layer
    uses only these blocks.
    """
    made = []
    for cache, width in zip(pair, (view.shape.key_width, view.shape.value_width), strict=True):
        shape = block_size, view.shape.kv_heads, width
        parts = bytes_of_block(cache) // (math.prod(shape) * cache.storage.itemsize)
        elements = cache.storage.reshape(-1)[view.part * math.prod(shape) :]
        array = elements.reshape(num_blocks * parts - view.part, *shape)
        made.append(parameter_over(array, str(cache.dtype).lower(), f"{cache.name}.{view}"))
    keys, values = made
    return keys, values


class GraphOwnedCache(KVTensors):
    def move_blocks(self, block_moves: Int32Array) -> None:
        if len(block_moves):
            raise WorkerError(
                "with model_config.backend: ge the KV cache is inside a graph, which cannot copy blocks: "
                "n, best_of and beams are not served"
            )


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _copy_bytes(sources: Sequence[Array], targets: Sequence[Array]) -> None:
    content = np.concatenate(sources)
    offset = 0
    for target in targets:
        part = content[offset : offset + len(target)]
        target[: len(part)] = part
        offset += len(target)


def element_bytes(backend: Backend) -> int:
    size: int = type_size_in_bytes(backend.activation_dtype)
    return size


def block_bytes(spec: ModelSpec, backend: Backend, block_size: int, *, int8: bool = False) -> int:
    return block_size * spec.kv_bytes_per_token(element_bytes(backend), int8=int8)


def num_blocks_for(num_bytes: int, one: int, block_size: int) -> int:
    """Return how many blocks of `one` bytes fit into `num_bytes`; at most MAX_SLOTS tokens. Raise ConfigError if 0."""
    if num_bytes < one:
        raise ConfigError(
            f"the KV cache must have room for one block of {one} bytes. Left beside the weights: {num_bytes} bytes"
        )
    return min(num_bytes // one, MAX_SLOTS // block_size)
