"""MindSpore checkpoints (`.ckpt`), which are protobuf messages, read without MindSpore and without copying weights.

The messages, by field number (proto2):

    Checkpoint   1: Value, repeated
    Value        1: tag (the name)    2: TensorProto    3: a map of tensors
    TensorProto  1: dims, repeated    2: tensor_type    3: tensor_content

A tensor of more than 512 MiB is stored as consecutive values with the same tag, each with the full shape and a part
of the content. The file may end with a checksum: `crc_num` and ten bytes.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, StoredTensor

_DTYPES: Final[Mapping[str, str]] = {dtype.checkpoint: dtype.safetensors for dtype in MODEL_DTYPES.values()}
_CRC: Final = b"crc_num"
_CRC_BYTES: Final = len(_CRC) + 10
_MAX_NAME_BYTES: Final = 1024
_MAX_DIMENSIONS: Final = 8

_TRAINING: Final = re.compile(
    r"^(adam_[mv]|moments?[12]?|accu_grads|grad_sum|exp_avg(_sq)?|scale_sense|optimizer)(\.|$)|"
    r"^(global_step|learning_rate|loss_scale|current_iterator_step|last_overflow_iterator_step|epoch_num|step_num|"
    r"current_step_step|beta[12]_power|network_.*|weight_decay)$"
)


class _CheckpointPiece(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_checkpoint(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, without training state. Raise ModelError if it is damaged or encrypted."""
    with open_regular(file) as stream:
        if not os.fstat(stream.fileno()).st_size:
            raise ModelError(f"{file} is empty")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                found = [_piece(content, start, end) for start, end in _values(content)]
            except (ValueError, IndexError) as error:
                raise ModelError(f"{file} is not a MindSpore checkpoint, is truncated or encrypted: {error}") from None
    tensors: dict[str, StoredTensor] = {}
    for name, group in itertools.groupby(found, lambda piece: piece.name):
        pieces = list(group)
        if _TRAINING.search(name):
            continue
        if name in tensors:
            raise ModelError(f"{file}: tensor {shorten(name)} occurs twice")
        tensors[name] = _joined(file, name, pieces)
    return tensors


def _joined(file: Path, name: str, pieces: list[_CheckpointPiece]) -> StoredTensor:
    dtype, shape = pieces[0].dtype, pieces[0].shape
    if dtype not in _DTYPES:
        raise ModelError(f"{file}: tensor {shorten(name)} must be {', '.join(_DTYPES)}. Found: {shorten(dtype)}")
    tensor = StoredTensor(file, _DTYPES[dtype], shape, tuple((each.start, each.num_bytes) for each in pieces))
    found = sum(each.num_bytes for each in pieces)
    if any((each.dtype, each.shape) != (dtype, shape) for each in pieces) or tensor.num_bytes != found:
        expected = math.prod(shape) * np.dtype(NUMPY_DTYPES[_DTYPES[dtype]]).itemsize
        raise ModelError(f"{file}: tensor {shorten(name)} must have {expected} bytes. Found: {found}")
    return tensor


def _values(content: mmap.mmap) -> Iterator[tuple[int, int]]:
    size = len(content)
    has_checksum = content[-_CRC_BYTES:][: len(_CRC)] == _CRC
    for field, start, end in _fields(content, 0, size - _CRC_BYTES * has_checksum):
        if field != 1 or start == end:
            raise ValueError(f"the field at byte {start} has the unknown number {field}")
        yield start, end


def _piece(content: mmap.mmap, start: int, end: int) -> _CheckpointPiece:
    name, tensor = b"", None
    for field, first, last in _fields(content, start, end):
        if field == 1:
            name = content[first : min(last, first + _MAX_NAME_BYTES)]
        elif field == 2:
            tensor = first, last
        else:
            raise ValueError(f"the value at byte {first} is not a tensor")
    if tensor is None or not name:
        raise ValueError(f"the value at byte {start} has no tensor or no name")
    return _tensor(content, name.decode(), *tensor)


def _tensor(content: mmap.mmap, name: str, start: int, end: int) -> _CheckpointPiece:
    shape: list[int] = []
    dtype, data = "", (end, 0)
    for field, first, last in _fields(content, start, end):
        if field == 1:
            while first < last:
                length, first = _varint(content, first, last)
                shape.append(length)
        elif field == 2:
            dtype = content[first : min(last, first + 64)].decode()
        elif field == 3:
            data = first, last - first
    if len(shape) > _MAX_DIMENSIONS or any(length >= 2**62 for length in shape):
        raise ValueError(f"tensor {shorten(name)} has the invalid shape {shorten(shape)}")
    return _CheckpointPiece(name, dtype, tuple(shape), *data)


def _fields(content: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each protobuf field from `at` to `end`, and where its content starts and ends."""
    while at < end:
        key, start = _varint(content, at, end)
        field, kind = key >> 3, key & 7
        if kind not in (0, 2):
            raise ValueError(f"the field at byte {start} has the unknown kind {kind}")
        length, at = _varint(content, start, end)
        if kind == 2:
            start, at = at, at + length
        if at > end:
            raise ValueError(f"{length} bytes must follow byte {start}, but only {end - start} do")
        yield field, start, at


def _varint(content: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number has no end before byte {at}")


def varint(value: int) -> bytes:
    """Encode a non-negative number with seven bits per byte, the lowest first."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def opening(field: int, length: int) -> bytes:
    """Encode the tag and length that precede the content of a field."""
    return varint(field << 3 | 2) + varint(length)


def content(field: int, data: bytes) -> bytes:
    return opening(field, len(data)) + data
