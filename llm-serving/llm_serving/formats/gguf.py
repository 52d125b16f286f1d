"""GGUF, the single-file model format of llama.cpp: its header and its tensors.

The header, little-endian (versions 2 and 3 of ggml's specification):

    "GGUF"   version u32   number of tensors u64   number of metadata entries u64
    metadata key, type u32, value; a string is its length u64 and UTF-8, an array its type u32, length u64 and items
    tensors  name, number of dimensions u32, dimensions u64 (innermost first), type u32, offset u64
    data     from the next multiple of `general.alignment` on; each tensor starts at a multiple of it

A large model may be split into several such files, named `name-00001-of-00003.gguf` and so on. The first one has the
metadata of the model.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.gguf_blocks import BLOCKS, BLOCKS_PART
from llm_serving.formats.gguf_layouts import HeadCounts
from llm_serving.formats.gguf_weights import named_weights
from llm_serving.formats.packed import PackedTensor, ReadableTensor, Scheme
from llm_serving.formats.stored_tensor import StoredTensor, check_apart

_VERSIONS: Final = (2, 3)
_PLAIN: Final[Mapping[int, str]] = {0: "F32", 1: "F16", 30: "BF16"}
_NUMBERS: Final[Mapping[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_TEXT: Final = 8
_LIST: Final = 9
_MAX_ENTRIES: Final = 2**16
_MAX_ITEMS: Final = 2**24
_MAX_NAME_BYTES: Final = 2**16
_MAX_TEXT_BYTES: Final = 2**24
_MAX_DIMENSIONS: Final = 4
_MAX_ALIGNMENT: Final = 2**16
_MAX_PARTS: Final = 99_999
_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufFile:
    """The header of a file, or of all parts of a split model.

    Attributes:
        file: The file or its first part.
        metadata: Metadata of this file by key. Arrays of strings are None, unless `read_gguf` was called with `texts`.
        types: Types of the tensors with two or more dimensions, such as Q4_K.
        block_elements, block_bytes: Number of elements of all block-quantized tensors, and their bytes in memory.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReadableTensor]
    types: tuple[str, ...]
    block_elements: int = 0
    block_bytes: int = 0


def files_of(file: Path) -> list[Path]:
    """Return the files of a model: all parts if the file is named as a part, otherwise the file alone."""
    match = _PART.fullmatch(file.name)
    count = 0 if match is None else int(match["count"])
    if match is None or not count:
        return [file]
    return [file.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read_gguf(file: Path, texts: bool = False) -> GgufFile:
    """Read the header of a file and, if the model is split, of all its parts; with `texts`, also arrays of strings."""
    first = _read_file(file, texts)
    count = max(1, _part_number(first, "split.count", 1, _MAX_PARTS))
    files = files_of(file)
    if len(files) != count:
        raise ModelError(f"{file}: must be named as a part of {count}, such as model-00001-of-{count:05}.gguf")
    if count == 1:
        return first
    if _part_number(first, "split.no", 0, count) != 0:
        raise ModelError(f"{file} is not the first part of a model; use the first part, {files[0].name}")
    if missing := [each.name for each in files if not each.exists()]:
        raise ModelError(f"{file}: part {missing[0]} is missing")
    parts = [first, *(_read_file(each, texts=False) for each in files[1:])]
    tensors: dict[str, ReadableTensor] = {}
    for number, part in enumerate(parts):
        place = _part_number(part, "split.no", 0, count), _part_number(part, "split.count", 1, _MAX_PARTS)
        if place != (number, count):
            raise ModelError(
                f"{part.file} must be part {number + 1} of {count}. It is part {place[0] + 1} of {place[1]}"
            )
        if twice := next((name for name in part.tensors if name in tensors), None):
            raise ModelError(f"{part.file}: tensor {shorten(twice)} occurs twice, also in {tensors[twice].file}")
        tensors |= part.tensors
    types = tuple(dict.fromkeys(name for part in parts for name in part.types))
    elements, num_bytes = sum(part.block_elements for part in parts), sum(part.block_bytes for part in parts)
    return GgufFile(file, first.metadata, tensors, types, elements, num_bytes)


def _part_number(found: GgufFile, key: str, default: int, maximum: int) -> int:
    value = found.metadata.get(key, default)
    if not isinstance(value, int) or not 0 <= value <= maximum:
        raise ModelError(f"{found.file}: `{key}` must be an integer from 0 to {maximum}. Found: {shorten(value)}")
    return value


def _read_file(file: Path, texts: bool) -> GgufFile:
    with open_regular(file) as stream:
        if not os.fstat(stream.fileno()).st_size:
            raise ModelError(f"{file} is empty")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _read(file, _HeaderReader(content), texts)
            except (ValueError, struct.error) as error:
                raise ModelError(f"{file} is not a GGUF file or is cut short: {error}") from None


class _HeaderReader:
    """Reads the items of a header in order. Raises ValueError if the file ends before an item."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.size = len(content)
        self.at = 0

    def read(self, length: int) -> bytes:
        if length > self.size - self.at:
            raise ValueError(f"{length} bytes must follow byte {self.at}, but only {self.size - self.at} do")
        self.at += length
        return self._content[self.at - length : self.at]

    def number(self, format_: Literal["<I", "<Q"]) -> int:
        value: int = struct.unpack(format_, self.read(struct.calcsize(format_)))[0]
        return value

    def count(self, maximum: int, what: str) -> int:
        value = self.number("<Q")
        if value > maximum:
            raise ValueError(f"{value} {what}; at most {maximum} are allowed")
        return value

    def text(self, maximum: int = _MAX_TEXT_BYTES) -> str:
        data = self.encoded_text(maximum)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"a text is not UTF-8: {shorten(data)}") from None

    def encoded_text(self, maximum: int = _MAX_TEXT_BYTES) -> bytes:
        return self.read(self.count(maximum, "bytes of a text"))


def _read(file: Path, reader: _HeaderReader, texts: bool) -> GgufFile:
    if reader.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise ModelError(f"{file}: version must be {' or '.join(map(str, _VERSIONS))}. Found: {version}")
    num_tensors, num_entries = reader.count(_MAX_ENTRIES, "tensors"), reader.count(_MAX_ENTRIES, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.text(_MAX_NAME_BYTES)
        if key in metadata:
            raise ModelError(f"{file}: `{shorten(key)}` occurs twice")
        metadata[key] = _value(reader, reader.number("<I"), texts)
    entries = [_tensor_info(file, reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
        raise ModelError(f"{file}: `general.alignment` must be 1 to {_MAX_ALIGNMENT}. Found: {shorten(alignment)}")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, ReadableTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise ModelError(f"{file}: tensor {shorten(entry.name)} occurs twice")
        tensors[entry.name] = entry.located(file, start, alignment, reader.size)
    check_apart(file, [(name, part) for name, each in tensors.items() for part in each.parts])
    types = dict.fromkeys(entry.type_name for entry in entries if len(entry.shape) > 1)
    in_blocks = [entry for entry in entries if entry.kind in BLOCKS]
    block_bytes = sum(BLOCKS[entry.kind].packed_bytes(entry.shape) for entry in in_blocks)
    return GgufFile(
        file, metadata, tensors, tuple(types), sum(math.prod(each.shape) for each in in_blocks), block_bytes
    )


def _value(reader: _HeaderReader, kind: int, texts: bool) -> Any:
    """Read a metadata value. Unless `texts`, skip an array of strings and return None for it."""
    if kind in _NUMBERS:
        return np.frombuffer(reader.read(np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])[0].item()
    if kind == _TEXT:
        return reader.text()
    if kind != _LIST:
        raise ValueError(f"the value at byte {reader.at} has the unknown type {kind}")
    inner, length = reader.number("<I"), reader.count(_MAX_ITEMS, "items of a list")
    if inner in _NUMBERS:
        return np.frombuffer(reader.read(length * np.dtype(_NUMBERS[inner]).itemsize), _NUMBERS[inner])
    if inner != _TEXT:
        raise ValueError(f"the list at byte {reader.at} has the unknown type {inner}")
    if texts:
        return [reader.text() for _ in range(length)]
    for _ in range(length):
        reader.encoded_text()
    return None


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def type_name(self) -> str:
        return _PLAIN.get(self.kind) or BLOCKS[self.kind].name

    def located(self, file: Path, start: int, alignment: int, size: int) -> ReadableTensor:
        block, dtype, shape = BLOCKS.get(self.kind), _PLAIN.get(self.kind, "U8"), self.shape
        if block is not None:
            if len(shape) not in (2, 3) or shape[-1] % block.elements:
                raise ModelError(
                    f"{file}: tensor {shorten(self.name)} of type {block.name} must have two or three dimensions, the "
                    f"last a multiple of {block.elements}. Found: {list(shape)}"
                )
            shape = math.prod(shape[:-1]), shape[-1] // block.elements * block.num_bytes
        at, num_bytes = start + self.offset, StoredTensor(file, dtype, shape, ()).num_bytes
        if self.offset % alignment or num_bytes > size - at:
            raise ModelError(
                f"{file}: tensor {shorten(self.name)} of {num_bytes} bytes must begin at a multiple of {alignment} "
                f"bytes and lie within the file of {size} bytes. Found: offset {self.offset} in the data"
            )
        stored = StoredTensor(file, dtype, shape, ((at, num_bytes),))
        return stored if block is None else PackedTensor(self.name, self.shape, {BLOCKS_PART: stored}, block)


def _tensor_info(file: Path, reader: _HeaderReader) -> _TensorInfo:
    name = reader.text(_MAX_NAME_BYTES)
    num_dimensions = reader.number("<I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {shorten(name)} must have 1 to {_MAX_DIMENSIONS} dimensions. Found: {num_dimensions}")
    shape = tuple(reader.count(2**40, "elements in a dimension") for _ in range(num_dimensions))[::-1]
    if not all(shape):
        raise ValueError(f"tensor {shorten(name)} has a dimension of 0")
    kind, offset = reader.number("<I"), reader.number("<Q")
    if kind not in _PLAIN and kind not in BLOCKS:
        known = ", ".join([*_PLAIN.values(), *(block.name for block in BLOCKS.values())])
        raise ModelError(f"{file}: tensor {shorten(name)} must have type {known}. Found: ggml type {kind}")
    return _TensorInfo(name, shape, kind, offset)


@dataclass(frozen=True)
class Gguf(Scheme):
    """The GGUF format. `architecture` and `heads` say how to convert tensors to Hugging Face's names and layouts."""

    description: str
    architecture: str
    heads: HeadCounts
    block_elements: int
    block_bytes: int

    @property
    def stored_types(self) -> str:
        return self.description.partition(", ")[2]

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        return named_weights(tensors, self.architecture, self.heads)
