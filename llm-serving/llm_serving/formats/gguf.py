"""GGUF, the single-file model format of llama.cpp: its header, and its tensors under Hugging Face's names.

The header, little-endian (versions 2 and 3 of ggml's specification):

    "GGUF"   version u32   number of tensors u64   number of metadata entries u64
    metadata key, type u32, value; a string is its length u64 and UTF-8, an array its type u32, length u64 and items
    tensors  name, number of dimensions u32, dimensions u64 (innermost first), type u32, offset u64
    data     from the next multiple of `general.alignment` on; each tensor starts at a multiple of it
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.formats.gguf_blocks import BLOCKS
from llm_serving.formats.packed import PackedTensor, Quantized, ReadableTensor
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import Array, StoredTensor, check_apart

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


@dataclass(frozen=True)
class GgufFile:
    """The header of a file.

    Attributes:
        metadata: Values by key; arrays of strings only on request.
        tensors: Tensors by their names in the file.
        types: Types of the two-dimensional tensors, such as Q4_K.
        block_elements, block_bytes: Elements of all tensors in blocks, and the bytes that they take as served.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReadableTensor]
    types: tuple[str, ...]
    block_elements: int = 0
    block_bytes: int = 0


def read_gguf(file: Path, texts: bool = False) -> GgufFile:
    """Read the header of a file, and no weight.

    Args:
        file: The file.
        texts: Whether to read arrays of strings, which a tokenizer consists of.

    Raises:
        ModelError: The file is no GGUF file, is cut short, contradicts itself, or has an unsupported tensor type.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if not size:
            raise ModelError(f"{file} is empty")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _read(file, _HeaderReader(content, size), texts)
            except (ValueError, struct.error) as error:
                raise ModelError(f"{file} is not a GGUF file or is cut short: {error}") from None


class _HeaderReader:
    """Reads one item after another; raises ValueError at the end of the file."""

    def __init__(self, content: mmap.mmap, size: int) -> None:
        self._content = content
        self.size = size
        self.at = 0

    def number(self, format_: str) -> Any:
        length = struct.calcsize(format_)
        self.need(length)
        (value,) = struct.unpack_from(format_, self._content, self.at)
        self.at += length
        return value

    def count(self, maximum: int, what: str) -> int:
        value: int = self.number("<Q")
        if value > maximum:
            raise ValueError(f"{value} {what}, where {maximum} are allowed")
        return value

    def text(self, maximum: int) -> str:
        length = self.count(maximum, "bytes of a text")
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
        length = self.count(_MAX_TEXT_BYTES, "bytes of a text")
        self.need(length)
        self.at += length

    def need(self, length: int) -> None:
        if length > self.size - self.at:
            raise ValueError(f"{length} bytes at byte {self.at}, where {self.size - self.at} are left")


def _read(file: Path, reader: _HeaderReader, texts: bool) -> GgufFile:
    if reader.bytes(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise ModelError(f"{file}: version must be {' or '.join(map(str, _VERSIONS))}. Found: {version}")
    num_tensors, num_entries = reader.count(_MAX_ENTRIES, "tensors"), reader.count(_MAX_ENTRIES, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.text(_MAX_NAME_BYTES)
        if key in metadata:
            raise ModelError(f"{file}: `{shorten(key)}` stands twice")
        metadata[key] = _value(reader, reader.number("<I"), texts)
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count not in (0, 1):
        raise ModelError(
            f"{file}: `split.count` must be 1. Found: {shorten(count)}; "
            f"`llama-gguf-split --merge` makes one file of several"
        )
    entries = [_tensor_info(file, reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
        raise ModelError(f"{file}: `general.alignment` must be 1 to {_MAX_ALIGNMENT}. Found: {shorten(alignment)}")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, ReadableTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise ModelError(f"{file}: tensor {shorten(entry.name)} stands twice")
        tensors[entry.name] = entry.located(file, start, alignment, reader.size)
    check_apart(file, [(name, part) for name, each in tensors.items() for part in each.parts])
    types = dict.fromkeys(entry.type_name for entry in entries if len(entry.shape) > 1)
    in_blocks = [entry for entry in entries if entry.kind in BLOCKS]
    block_bytes = sum(BLOCKS[entry.kind].packed_bytes(entry.shape) for entry in in_blocks)
    return GgufFile(
        file, metadata, tensors, tuple(types), sum(math.prod(each.shape) for each in in_blocks), block_bytes
    )


def _value(reader: _HeaderReader, kind: int, texts: bool) -> Any:
    """Read a metadata value. An array of strings that is not requested is skipped and becomes None."""
    if kind in _NUMBERS:
        return np.frombuffer(reader.bytes(np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])[0].item()
    if kind == _TEXT:
        return reader.text(_MAX_TEXT_BYTES)
    if kind != _LIST:
        raise ValueError(f"a value of type {kind} at byte {reader.at}")
    inner, length = reader.number("<I"), reader.count(_MAX_ITEMS, "items of a list")
    if inner in _NUMBERS:
        return np.frombuffer(reader.bytes(length * np.dtype(_NUMBERS[inner]).itemsize), _NUMBERS[inner])
    if inner != _TEXT:
        raise ValueError(f"a list of type {inner} at byte {reader.at}")
    if texts:
        return [reader.text(_MAX_TEXT_BYTES) for _ in range(length)]
    for _ in range(length):
        reader.skip_text()
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
        at = start + self.offset
        if (plain := _PLAIN.get(self.kind)) is not None:
            stored = StoredTensor(file, plain, self.shape, ((at, 0),))
            stored = StoredTensor(file, plain, self.shape, ((at, stored.num_bytes),))
            self._check_bounds(file, stored, alignment, size)
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
        self._check_bounds(file, stored, alignment, size)
        return PackedTensor(self.name, self.shape, {"blocks": stored}, lambda arrays: block.unpacked(arrays["blocks"]))

    def _check_bounds(self, file: Path, stored: StoredTensor, alignment: int, size: int) -> None:
        ((at, num_bytes),) = stored.pieces
        if self.offset % alignment or num_bytes > size - at:
            raise ModelError(
                f"{file}: tensor {shorten(self.name)} of {num_bytes} bytes must begin at a multiple of {alignment} and "
                f"lie within the file of {size}. Found: offset {self.offset} of the data"
            )


def _tensor_info(file: Path, reader: _HeaderReader) -> _TensorInfo:
    name = reader.text(_MAX_NAME_BYTES)
    num_lengths = reader.number("<I")
    if not 1 <= num_lengths <= _MAX_DIMENSIONS:
        raise ValueError(f"{num_lengths} lengths of tensor {shorten(name)}")
    shape = tuple(reader.count(2**40, "elements of a length") for _ in range(num_lengths))[::-1]
    kind, offset = reader.number("<I"), reader.number("<Q")
    if kind not in _PLAIN and kind not in BLOCKS:
        known = ", ".join([*_PLAIN.values(), *(block.name for block in BLOCKS.values())])
        raise ModelError(f"{file}: tensor {shorten(name)} must be {known}. Found: type {kind} of ggml")
    return _TensorInfo(name, shape, kind, offset)


METHOD: Final = "gguf"
"""`quant_method` of a configuration that was read from a GGUF file."""

_WHOLE: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME: Final = re.compile(r"^(?:blk\.(?P<layer>\d{1,6})\.)?(?P<role>[a-z_]+)\.(?P<kind>weight|bias)$")
_HUGGING_FACE_PREFIXES: Final = ("model.", "lm_head.")
"""Prefixes of Hugging Face's names: such a tensor would be accepted with its rows in the wrong order."""
ROTATION: Final = "rope_freqs.weight"
"""Divisors of the rotary frequencies; they belong to the configuration and are no weight."""


@dataclass(frozen=True)
class Gguf:
    """The scheme of GGUF tensors.

    Attributes:
        heads, kv_heads: Numbers of heads whose rows interleave rotary pairs, as in Llama's files; 0: rows stay in
            order.
        block_elements, block_bytes: Elements of all tensors in blocks, and the bytes that they take as served.
    """

    description: str
    heads: int = 0
    kv_heads: int = 0
    block_elements: int = 0
    block_bytes: int = 0
    activation_bits: int | None = None

    @property
    def stored_types(self) -> str:
        """The types of the file, such as "Q4_K, Q6_K"."""
        return self.description.partition(", ")[2]

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        weights: dict[str, ReadableTensor] = {}
        for name, tensor in tensors.items():
            if name == ROTATION:
                continue
            known = hugging_face_name(name)
            if known == name and name.startswith(_HUGGING_FACE_PREFIXES):
                raise ModelError(f"{tensor.file}: tensor {name} is not named as tensors of this form are")
            if known in weights:
                raise ModelError(f"{tensor.file}: tensor {name} stands twice, as {known}")
            weights[known] = self._with_split_pairs(name, tensor)
        return weights

    def _with_split_pairs(self, name: str, tensor: ReadableTensor) -> ReadableTensor:
        role = name.rpartition(".")[0].rpartition(".")[2]
        heads = {"attn_q": self.heads, "attn_k": self.kv_heads}.get(role, 0)
        if not heads:
            return tensor
        if tensor.shape[0] % (2 * heads):
            raise ModelError(f"{tensor.file}: tensor {name} must have rows of {heads} heads. Found: {tensor.shape[0]}")
        order = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if isinstance(tensor, StoredTensor):
            return PackedTensor(name, tensor.shape, {"rows": tensor}, lambda arrays: arrays["rows"][order])
        unpack = tensor.unpack
        return replace(tensor, unpack=lambda arrays: _in_order(unpack(arrays), order))


def hugging_face_name(name: str) -> str:
    """Return the Hugging Face name of a tensor; an unknown name is returned as it is and fits no model."""
    match = _NAME.match(name)
    known = match and (_OF_LAYER if match["layer"] else _WHOLE).get(match["role"])
    if match is None or known is None:
        return name
    return (
        f"model.layers.{int(match['layer'])}.{known}.{match['kind']}" if match["layer"] else f"{known}.{match['kind']}"
    )


def _in_order(found: Quantized | Array, order: Array) -> Quantized | Array:
    assert not isinstance(found, QuantizedTensor)
    return found.select(order) if isinstance(found, BlockTensor) else found[order]
