"""Converts tensors of GGUF files from the layouts of these files to those of Hugging Face's folders.

A function that only selects consecutive rows (`StoredTensor.part`) or reorders rows (`PackedTensor.order`) keeps blocks
quantized. If a function must dequantize blocks, its docstring says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.formats.gguf_blocks import BLOCKS_PART, BlockType
from llm_serving.formats.packed import PackedTensor, ReadableTensor
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import Array, StoredTensor, to_float32

LATENT_VALUES: Final = "attn_v_b"
"""Name of the tensor with the value projection of latent attention. It is read together with the key projection."""


class HeadCounts(NamedTuple):
    """Numbers of heads, on which some layouts depend; 0 means unknown. `linear_keys` and `linear_values` count the
    heads of layers with the gated delta rule. `linear_dim` is the number of elements of a value head in these layers.
    """

    q: int = 0
    kv: int = 0
    linear_keys: int = 0
    linear_values: int = 0
    linear_dim: int = 0


Layout = Callable[[str, ReadableTensor, HeadCounts], ReadableTensor]
"""Function of (name in the file, tensor, numbers of heads) that returns the tensor in the layout of Hugging Face."""


def head_rows(name: str, tensor: ReadableTensor, heads: int, multiple: int = 1) -> int:
    if not heads or tensor.shape[0] % (multiple * heads):
        raise ModelError(
            f"{tensor.file}: tensor {name} must have equally many rows for each of {heads} heads. "
            f"Found: {tensor.shape[0]} rows"
        )
    return tensor.shape[0] // heads


def with_split_pairs(name: str, tensor: ReadableTensor, heads: int) -> ReadableTensor:
    head_rows(name, tensor, heads, 2)
    order = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return rows_in_order(name, tensor, order)


def experts_of(name: str, tensor: ReadableTensor) -> Iterator[ReadableTensor]:
    dimensions = 2 if name.endswith(".bias") else 3
    if len(tensor.shape) != dimensions:
        raise ModelError(f"{tensor.file}: tensor {name} must have {dimensions} dimensions. Found: {list(tensor.shape)}")
    if dimensions == 2 and not isinstance(tensor, StoredTensor):
        raise ModelError(f"{tensor.file}: tensor {name} must not be block-quantized")
    count, rows = tensor.shape[:2]
    return (rows_of(tensor, number * rows, tensor.shape[1:]) for number in range(count))


def rows_of(tensor: ReadableTensor, start: int, shape: tuple[int, ...]) -> ReadableTensor:
    """Return the rows from row `start` on, as a tensor of shape `shape`. A row of a vector is one element."""
    if isinstance(tensor, StoredTensor):
        return tensor.part(start * (shape[-1] if len(shape) > 1 else 1), shape)
    stored = {
        ending: part.part(start * part.shape[-1], (shape[0], part.shape[-1])) for ending, part in tensor.stored.items()
    }
    return replace(tensor, shape=shape, stored=stored)


def rows_in_order(name: str, tensor: ReadableTensor, order: Array) -> PackedTensor:
    """Return the rows whose indices are listed in `order`, in that order. Blocks are not dequantized."""
    shape = (len(order), *tensor.shape[1:])
    if isinstance(tensor, PackedTensor):
        return replace(tensor, shape=shape, order=order)
    return PackedTensor(name, shape, {"rows": tensor}, lambda arrays: arrays["rows"], order)


def flat(name: str, tensor: ReadableTensor, heads: HeadCounts) -> StoredTensor:
    return _plain(name, tensor, (math.prod(tensor.shape),))


def taps(name: str, tensor: ReadableTensor, heads: HeadCounts) -> ReadableTensor:
    """Reshape a convolution weight [channels, taps] to [channels, 1, taps]. A bias keeps its shape."""
    return tensor if len(tensor.shape) == 1 else _plain(name, tensor, (tensor.shape[0], 1, tensor.shape[-1]))


def rates(name: str, tensor: ReadableTensor, heads: HeadCounts) -> PackedTensor:
    """Return `A_log` of a recurrent layer. The file stores -exp(A_log)."""

    def unpack(arrays: Mapping[str, Array]) -> Array:
        decays = to_float32(arrays["decays"]).reshape(-1)
        if not (decays < 0).all():
            raise ModelError(f"all elements must be negative. The largest one is {decays.max()}")
        logarithms: Array = np.log(-decays)
        return logarithms

    vector = flat(name, tensor, heads)
    return PackedTensor(name, vector.shape, {"decays": vector}, unpack)


def of_each_head(name: str, tensor: ReadableTensor, heads: HeadCounts) -> ReadableTensor:
    """Reorder rows from [all queries, all keys, all values] to the query, key and value of each head in turn."""
    own = head_rows(name, tensor, 3 * heads.q)
    return rows_in_order(name, tensor, np.arange(tensor.shape[0]).reshape(3, heads.q, own).swapaxes(0, 1).reshape(-1))


def parts_of_groups(name: str, tensor: ReadableTensor, heads: HeadCounts, *, parts: slice) -> ReadableTensor:
    """Return some of q, k, v, z of `in_proj_qkvz`, in order. The file stores the parts of each key head together."""
    own = head_rows(name, tensor, heads.linear_keys)
    values = heads.linear_values // heads.linear_keys * heads.linear_dim
    key_dim = own // 2 - values
    rows = np.arange(tensor.shape[0]).reshape(heads.linear_keys, own)
    split = np.split(rows, (key_dim, 2 * key_dim, 2 * key_dim + values), axis=1)
    return rows_in_order(name, tensor, np.concatenate([each.reshape(-1) for each in split[parts]]))


def half_of_groups(name: str, tensor: ReadableTensor, heads: HeadCounts, *, half: int) -> ReadableTensor:
    """Return the first (0) or second (1) half of each key head's rows: the b or the a of Qwen3-Next's `in_proj_ba`."""
    own = head_rows(name, tensor, heads.linear_keys, 2)
    rows = np.arange(tensor.shape[0]).reshape(heads.linear_keys, 2, own // 2)
    return rows_in_order(name, tensor, rows[:, half].reshape(-1))


def untiled(name: str, tensor: ReadableTensor, heads: HeadCounts) -> ReadableTensor:
    """Return the rows with value heads grouped by key head. The file has the first value head of every key head, then
    the second of every key head, and so on. Any rows before the value heads keep their position.
    """
    own = 1 if len(tensor.shape) == 1 or tensor.shape[0] == heads.linear_values else heads.linear_dim
    first = tensor.shape[0] - heads.linear_values * own
    if first < 0:
        raise ModelError(
            f"{tensor.file}: tensor {name} must have at least {heads.linear_values * own} rows, {own} for each of "
            f"{heads.linear_values} value heads. Found: {tensor.shape[0]}"
        )
    return rows_in_order(name, tensor, np.concatenate([np.arange(first), first + _untiled(heads, own)]))


def untiled_rates(name: str, tensor: ReadableTensor, heads: HeadCounts) -> ReadableTensor:
    return replace(rates(name, tensor, heads), order=_untiled(heads, 1))


def untiled_taps(name: str, tensor: ReadableTensor, heads: HeadCounts) -> ReadableTensor:
    return untiled(name, taps(name, tensor, heads), heads)


def untiled_columns(name: str, tensor: ReadableTensor, heads: HeadCounts) -> ReadableTensor:
    """Reorder columns as `untiled` reorders rows. Dequantize the blocks if a block may span several heads."""
    order, shape = _untiled(heads, heads.linear_dim), tensor.shape
    if len(shape) != 2 or shape[1] != len(order):
        raise ModelError(f"{tensor.file}: tensor {name} must have {len(order)} columns. Found: {list(shape)}")
    if isinstance(tensor, StoredTensor):
        return PackedTensor(name, shape, {"rows": tensor}, lambda arrays: arrays["rows"][:, order])
    block = tensor.unpack
    assert isinstance(block, BlockType)
    if heads.linear_dim % block.elements:
        return replace(tensor, unpack=lambda arrays: block.unpacked(arrays[BLOCKS_PART]).dequantized()[:, order])
    blocks = order[:: block.elements] // block.elements

    def unpack(arrays: Mapping[str, Array]) -> BlockTensor:
        stored = arrays[BLOCKS_PART]
        return block.unpacked(stored.reshape(len(stored), -1, block.num_bytes)[:, blocks].reshape(stored.shape))

    return replace(tensor, unpack=unpack)


def _untiled(heads: HeadCounts, own: int) -> Array:
    rows = np.arange(heads.linear_values * own).reshape(-1, heads.linear_keys, own)
    return rows.swapaxes(0, 1).reshape(-1)


def _plain(name: str, tensor: ReadableTensor, shape: tuple[int, ...]) -> StoredTensor:
    if not isinstance(tensor, StoredTensor):
        raise ModelError(f"{tensor.file}: tensor {name} must not be block-quantized")
    return replace(tensor, shape=shape)


def less_one(arrays: Mapping[str, Array]) -> Array:
    values: Array = to_float32(arrays["values"]) - np.float32(1)
    return values


def joined_latents(name: str, keys: ReadableTensor, values: ReadableTensor | None, heads: int) -> PackedTensor:
    """Return kv_b_proj [heads * (n + v), rank] of latent attention: n rows of keys, then v of values for each head.

    A file stores `keys` as [heads, rank, n] and `values` as [heads, v, rank], or with the first two dimensions joined.
    Raise ModelError if `values` is None, which stands for a missing tensor, or if the shapes do not match.
    """
    if values is None:
        raise ModelError(f"{keys.file}: tensor {name} needs tensor {LATENT_VALUES} of the same layer, which is missing")
    rank = values.shape[-1]
    num_keys, num_rows = keys.shape[-1], int(np.prod(values.shape[:-1]))
    if not heads or num_rows % heads or int(np.prod(keys.shape[:-1])) != heads * rank:
        raise ModelError(
            f"{keys.file}: tensor {name} must have {heads} matrices of {rank} rows. Found: {list(keys.shape)}"
        )
    stored: dict[str, StoredTensor] = {}
    for each, tensor in (("keys", keys), ("values", values)):
        parts = {"": tensor} if isinstance(tensor, StoredTensor) else tensor.stored
        stored |= {f"{each}.{ending}": part for ending, part in parts.items()}

    def unpack(arrays: Mapping[str, Array]) -> Array:
        k = _elements("keys", keys, arrays).reshape(heads, rank, num_keys).swapaxes(1, 2)
        v = _elements("values", values, arrays).reshape(heads, -1, rank)
        joined: Array = np.concatenate([k, v], axis=1).reshape(-1, rank)
        return joined

    return PackedTensor(name, (heads * num_keys + num_rows, rank), stored, unpack)


def _elements(which: str, tensor: ReadableTensor, arrays: Mapping[str, Any]) -> Array:
    own = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{which}.")}
    if isinstance(tensor, StoredTensor):
        return to_float32(own[""])
    found = tensor.unpack(own)
    assert not isinstance(found, QuantizedTensor)
    return found if isinstance(found, np.ndarray) else found.dequantized()
