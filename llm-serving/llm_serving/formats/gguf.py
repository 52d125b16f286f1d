"""GGUF: the one file of a model for llama.cpp, with facts, tokenizer and weights.

The header, little-endian (versions 2 and 3 of the specification of ggml):

    "GGUF"   version u32   number of tensors u64   number of facts u64
    facts    key, type u32, value; a text is its length u64 and UTF-8, a list its type u32, its length u64 and its items
    tensors  name, number of lengths u32, lengths u64 (the innermost first), type u32, offset u64
    data     from the next multiple of `general.alignment` on; each tensor begins at a multiple of it
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.gguf_blocks import BLOCKS
from llm_serving.formats.packed import PackedTensor, ReadableTensor
from llm_serving.formats.stored import StoredTensor, check_apart

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
"""Type of a fact -> of NumPy."""
_TEXT: Final = 8
_LIST: Final = 9
_MOST: Final = 2**16
"""Tensors, and facts."""
_MOST_ITEMS: Final = 2**24
_MOST_NAME_BYTES: Final = 2**16
_MOST_TEXT_BYTES: Final = 2**24
_MOST_LENGTHS: Final = 4
_MOST_ALIGNMENT: Final = 2**16


@dataclass(frozen=True)
class GgufFile:
    """
    Attributes:
        facts: By key; lists of texts only where they were asked for.
        tensors: By the names of the file.
        types: Of its weights with two lengths, such as Q4_K.
    """

    file: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, ReadableTensor]
    types: tuple[str, ...]


def read_gguf(file: Path, texts: bool = False) -> GgufFile:
    """The header of a file; no weight is read.

    Args:
        file: The file.
        texts: Whether lists of texts are wanted too, which a tokenizer consists of.

    Raises:
        ModelError: The file is none, is cut short, contradicts itself, or has a weight of a type that is not read.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if not size:
            raise ModelError(f"{file} is empty")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _read(file, _Reader(content, size), texts)
            except (ValueError, struct.error) as error:
                raise ModelError(f"{file} is not a GGUF file or is cut short: {error}") from None


class _Reader:
    """Takes one thing after another from a file; ValueError where the file ends before."""

    def __init__(self, content: mmap.mmap, size: int) -> None:
        self._content = content
        self.size = size
        self.at = 0

    def number(self, form: str) -> Any:
        length = struct.calcsize(form)
        self.need(length)
        (value,) = struct.unpack_from(form, self._content, self.at)
        self.at += length
        return value

    def count(self, most: int, what: str) -> int:
        value: int = self.number("<Q")
        if value > most:
            raise ValueError(f"{value} {what}, where {most} are allowed")
        return value

    def text(self, most: int) -> str:
        length = self.count(most, "bytes of a text")
        data = self.bytes(length)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"a text that is not UTF-8: {shorten(data)}") from None

    def bytes(self, length: int) -> bytes:
        self.need(length)
        self.at += length
        return self._content[self.at - length : self.at]

    def skip_text(self) -> None:
        length = self.count(_MOST_TEXT_BYTES, "bytes of a text")
        self.need(length)
        self.at += length

    def need(self, length: int) -> None:
        if length > self.size - self.at:
            raise ValueError(f"{length} bytes at byte {self.at}, where {self.size - self.at} are left")


def _read(file: Path, reader: _Reader, texts: bool) -> GgufFile:
    if reader.bytes(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise ModelError(f"{file}: version must be {' or '.join(map(str, _VERSIONS))}. Found: {version}")
    num_tensors, num_facts = reader.count(_MOST, "tensors"), reader.count(_MOST, "facts")
    facts: dict[str, Any] = {}
    for _ in range(num_facts):
        key = reader.text(_MOST_NAME_BYTES)
        if key in facts:
            raise ModelError(f"{file}: `{shorten(key)}` stands twice")
        facts[key] = _value(reader, reader.number("<I"), texts)
    count = facts.get("split.count", 1)
    if not isinstance(count, int) or count not in (0, 1):
        raise ModelError(
            f"{file}: `split.count` must be 1. Found: {shorten(count)}; "
            f"`llama-gguf-split --merge` makes one file of several"
        )
    entries = [_entry(file, reader) for _ in range(num_tensors)]
    alignment = facts.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MOST_ALIGNMENT:
        raise ModelError(f"{file}: `general.alignment` must be 1 to {_MOST_ALIGNMENT}. Found: {shorten(alignment)}")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, ReadableTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise ModelError(f"{file}: tensor {shorten(entry.name)} stands twice")
        tensors[entry.name] = entry.placed(file, start, alignment, reader.size)
    check_apart(file, [(name, part) for name, each in tensors.items() for part in each.parts])
    types = dict.fromkeys(entry.type_name for entry in entries if len(entry.shape) > 1)
    return GgufFile(file, facts, tensors, tuple(types))


def _value(reader: _Reader, kind: int, texts: bool) -> Any:
    """A fact; of a list of texts that is not wanted its length is checked and None is left."""
    if kind in _NUMBERS:
        return np.frombuffer(reader.bytes(np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])[0].item()
    if kind == _TEXT:
        return reader.text(_MOST_TEXT_BYTES)
    if kind != _LIST:
        raise ValueError(f"a fact of type {kind} at byte {reader.at}")
    inner, length = reader.number("<I"), reader.count(_MOST_ITEMS, "items of a list")
    if inner in _NUMBERS:
        return np.frombuffer(reader.bytes(length * np.dtype(_NUMBERS[inner]).itemsize), _NUMBERS[inner])
    if inner != _TEXT:
        raise ValueError(f"a list of type {inner} at byte {reader.at}")
    if texts:
        return [reader.text(_MOST_TEXT_BYTES) for _ in range(length)]
    for _ in range(length):
        reader.skip_text()
    return None


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def type_name(self) -> str:
        return _PLAIN.get(self.kind) or BLOCKS[self.kind].name

    def placed(self, file: Path, start: int, alignment: int, size: int) -> ReadableTensor:
        """The tensor in its file, which it does not leave."""
        at = start + self.offset
        if (plain := _PLAIN.get(self.kind)) is not None:
            stored = StoredTensor(file, plain, self.shape, ((at, 0),))
            stored = StoredTensor(file, plain, self.shape, ((at, stored.num_bytes),))
            self._check_place(file, stored, alignment, size)
            return stored
        block = BLOCKS[self.kind]
        if len(self.shape) != 2 or self.shape[1] % block.elements:
            raise ModelError(
                f"{file}: tensor {shorten(self.name)} of type {block.name} must have two lengths, the columns a "
                f"multiple of {block.elements}. Found: {list(self.shape)}"
            )
        out, width = self.shape
        row_bytes = width // block.elements * block.num_bytes
        stored = StoredTensor(file, "U8", (out, row_bytes), ((at, out * row_bytes),))
        self._check_place(file, stored, alignment, size)
        return PackedTensor(self.name, self.shape, {"blocks": stored}, lambda arrays: block.unpacked(arrays["blocks"]))

    def _check_place(self, file: Path, stored: StoredTensor, alignment: int, size: int) -> None:
        ((at, num_bytes),) = stored.pieces
        if self.offset % alignment or num_bytes > size - at:
            raise ModelError(
                f"{file}: tensor {shorten(self.name)} of {num_bytes} bytes must begin at a multiple of {alignment} and "
                f"lie within the file of {size}. Found: offset {self.offset} of the data"
            )


def _entry(file: Path, reader: _Reader) -> _Entry:
    name = reader.text(_MOST_NAME_BYTES)
    num_lengths = reader.number("<I")
    if not 1 <= num_lengths <= _MOST_LENGTHS:
        raise ValueError(f"{num_lengths} lengths of tensor {shorten(name)}")
    shape = tuple(reader.count(2**40, "elements of a length") for _ in range(num_lengths))[::-1]
    kind, offset = reader.number("<I"), reader.number("<Q")
    if kind not in _PLAIN and kind not in BLOCKS:
        known = ", ".join([*_PLAIN.values(), *(block.name for block in BLOCKS.values())])
        raise ModelError(f"{file}: tensor {shorten(name)} must be {known}. Found: type {kind} of ggml")
    return _Entry(name, shape, kind, offset)
