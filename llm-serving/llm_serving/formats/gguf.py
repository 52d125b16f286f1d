"""GGUF: the one file of a model for llama.cpp, with facts, tokenizer and weights.

The header, little-endian (versions 2 and 3 of the specification of ggml):

    "GGUF"   version u32   number of tensors u64   number of facts u64
    facts    key, type u32, value; a text is its length u64 and UTF-8, a list its type u32, its length u64 and its items
    tensors  name, number of lengths u32, lengths u64 (the innermost first), type u32, offset u64
    data     from the next multiple of `general.alignment` on; each tensor begins at a multiple of it

The blocks of quantised weights in GGUF (ggml-common.h of ggml has the layouts): what a row of them stands for.

    Q4_0   32 elements    d f16, 16 bytes: low halves are the first 16, high halves the others      (q - 8) d
    Q4_1   32 elements    d f16, m f16, 16 bytes as of Q4_0                                         q d + m
    Q5_0   32 elements    d f16, fifth bits u32, 16 bytes as of Q4_0                                (q - 16) d
    Q5_1   32 elements    d f16, m f16, fifth bits u32, 16 bytes as of Q4_0                         q d + m
    Q8_0   32 elements    d f16, 32 int8                                                            q d
    Q4_K   256 elements   d f16, m f16, 12 bytes of scales and minima, 128 bytes                    q d s - m n
    Q5_K   256 elements   the same with 32 bytes of fifth bits before the last                      q d s - m n
    Q6_K   256 elements   128 bytes of low halves, 64 of upper bits, 16 int8 of scales, d f16       (q - 32) d s

s and n are of groups of 32 elements, of Q6_K of 16.

The tensors of a GGUF file by the names, and with the rows, that Hugging Face's folders have.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.packed import PackedTensor, ReadableTensor
from llm_serving.formats.quantized_tensor import QuantizedTensor, check_scales
from llm_serving.formats.stored_tensor import Array, StoredTensor, check_apart

Uint8Array = NDArray[np.uint8]
Float32Array = NDArray[np.float32]

_AT_ONCE: Final = 2**22
"""Elements that are computed together, where values are."""


@dataclass(frozen=True)
class Block:
    """A type of weights.

    Attributes:
        elements: Of a block.
        num_bytes: Of a block.
        unpack: [n, num_bytes] blocks -> their codes and scales, or float32 values [n, elements].
        bits: Of the codes; 0: values.
        group: Elements of a scale.
    """

    name: str
    elements: int
    num_bytes: int
    unpack: Callable[[Uint8Array], Any]
    bits: int = 0
    group: int = 32

    def unpacked(self, rows: Array) -> QuantizedTensor | Array:
        """[out, bytes of a row] -> the matrix."""
        out = len(rows)
        width = rows.shape[1] // self.num_bytes * self.elements
        if self.bits:
            codes, scales = self.unpack(np.asarray(rows).reshape(-1, self.num_bytes))
            of_rows = np.ascontiguousarray(codes.reshape(out, width))
            return QuantizedTensor(of_rows, scales.reshape(out, -1), None, self.bits, min(self.group, max(1, width)))
        values = np.empty((out, width), np.float32)
        step = max(1, _AT_ONCE // max(1, width))
        for start in range(0, out, step):
            part = np.asarray(rows[start : start + step])
            values[start : start + step] = self.unpack(part.reshape(-1, self.num_bytes)).reshape(len(part), width)
        return values


def _halves(blocks: Uint8Array, start: int) -> Float32Array:
    """[n, 1] the float16 that begins at a byte, a scale."""
    scales = np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)
    check_scales(scales)
    return scales


def _low_then_high(packed: Uint8Array) -> Uint8Array:
    """[..., n] bytes -> [..., 2 n] codes: low halves, then high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Uint8Array) -> tuple[Uint8Array, Float32Array]:
    return _low_then_high(blocks[:, 2:]), _halves(blocks, 0)


def _q4_1(blocks: Uint8Array) -> Float32Array:
    values: Float32Array = _low_then_high(blocks[:, 4:]) * _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _five_bits(blocks: Uint8Array) -> Uint8Array:
    """[n, 20] fifth bits and the others -> [n, 32] codes."""
    fifth = np.unpackbits(blocks[:, :4], axis=1, bitorder="little")
    return _low_then_high(blocks[:, 4:]) | fifth << np.uint8(4)


def _q5_0(blocks: Uint8Array) -> tuple[NDArray[np.int8], Float32Array]:
    return (_five_bits(blocks[:, 2:]) - np.uint8(16)).view(np.int8), _halves(blocks, 0)


def _q5_1(blocks: Uint8Array) -> Float32Array:
    values: Float32Array = _five_bits(blocks[:, 4:]) * _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _q8_0(blocks: Uint8Array) -> tuple[NDArray[np.int8], Float32Array]:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0)


def _q6_k(blocks: Uint8Array) -> tuple[NDArray[np.int8], Float32Array]:
    # Half a block has 128 elements in four runs of 32: a byte of low halves serves two runs, one of upper bits four.
    low = _low_then_high(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | upper << 4) - np.uint8(32)
    scales = _halves(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return codes.view(np.int8), scales


def _scales_and_minima(packed: Uint8Array) -> tuple[Float32Array, Float32Array]:
    """[n, 12] -> [n, 8, 1] each, of 6 bits: four in the low bits of bytes, the upper two of the others above them."""
    first, second, both = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, both & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, both >> 4 | second >> 6 << 4], axis=1)
    return scales[..., None].astype(np.float32), minima[..., None].astype(np.float32)


def _of_runs(blocks: Uint8Array, codes: Uint8Array) -> Float32Array:
    """[n, 8, 32] codes -> values, by the scales and minima that a block begins with."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scales *= _halves(blocks, 0)[..., None]
    minima *= _halves(blocks, 2)[..., None]
    values: Float32Array = codes * scales
    values -= minima
    return values


def _q4_k(blocks: Uint8Array) -> Float32Array:
    return _of_runs(blocks, _low_then_high(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Uint8Array) -> Float32Array:
    codes = _low_then_high(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _of_runs(blocks, (codes | fifth << 4).astype(np.uint8))


BLOCKS: Final[Mapping[int, Block]] = {
    2: Block("Q4_0", 32, 18, _q4_0, bits=4),
    3: Block("Q4_1", 32, 20, _q4_1),
    6: Block("Q5_0", 32, 22, _q5_0, bits=8),
    7: Block("Q5_1", 32, 24, _q5_1),
    8: Block("Q8_0", 32, 34, _q8_0, bits=8),
    12: Block("Q4_K", 256, 144, _q4_k),
    13: Block("Q5_K", 256, 176, _q5_k),
    14: Block("Q6_K", 256, 210, _q6_k, bits=8, group=16),
}
"""By the number that ggml gives the type."""


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


METHOD: Final = "gguf"
"""`quant_method` of a configuration that was read out of such a file."""

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
_OTHER_FORM: Final = ("model.", "lm_head.")
"""How names of Hugging Face begin: under one of them a tensor would be taken with its rows in another order."""
ROTATION: Final = "rope_freqs.weight"
"""What frequencies of rotation are divided by: no weight, and part of the configuration."""


@dataclass(frozen=True)
class Gguf:
    """
    Attributes:
        heads, kv_heads: Whose rows the file has with neighbours turning together, as it has Llama's; 0: as they are.
    """

    described: str
    heads: int = 0
    kv_heads: int = 0
    activation_bits: int | None = None

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        weights: dict[str, ReadableTensor] = {}
        for name, tensor in tensors.items():
            if name == ROTATION:
                continue
            known = hugging_face_name(name)
            if known == name and name.startswith(_OTHER_FORM):
                raise ModelError(f"{tensor.file}: tensor {name} is not named as tensors of this form are")
            if known in weights:
                raise ModelError(f"{tensor.file}: tensor {name} stands twice, as {known}")
            weights[known] = self._turned(name, tensor)
        return weights

    def _turned(self, name: str, tensor: ReadableTensor) -> ReadableTensor:
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
    """Of a tensor of the file; one that is not known keeps its name, which no model has a place for."""
    match = _NAME.match(name)
    known = match and (_OF_LAYER if match["layer"] else _WHOLE).get(match["role"])
    if match is None or known is None:
        return name
    return (
        f"model.layers.{int(match['layer'])}.{known}.{match['kind']}" if match["layer"] else f"{known}.{match['kind']}"
    )


def _in_order(found: QuantizedTensor | Array, order: Array) -> QuantizedTensor | Array:
    if isinstance(found, QuantizedTensor):
        return replace(found, codes=found.codes[order], scales=found.scales[order])
    return found[order]
