"""Weights of a model folder: safetensors files, memory-mapped, one tensor at a time.

The format is read here rather than by the safetensors package because that has no NumPy type for bfloat16: a file is
eight bytes of header length (little-endian), a JSON header of names, types, shapes and offsets, and the raw data.
Nothing of the folder is executed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.files import open_regular, read_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.models.read_ahead import Extent, ReadAhead

Array = NDArray[Any]

INDEX_NAME: Final = "model.safetensors.index.json"

# bfloat16 travels as its bits: NumPy has no such type.
_NUMPY_DTYPES: Final[Mapping[str, type[np.generic]]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_MAX_HEADER_BYTES: Final = 32 * 2**20
_MAX_INDEX_BYTES: Final = 64 * 2**20
_MAX_DIMENSIONS: Final = 8

# Below this, reading ahead saves less than a thread costs.
_LEAST_READ_AHEAD: Final = 1 << 26

# Derived tables that some exporters write beside the weights.
_IGNORED: Final = re.compile(r"(^|\.)rotary_emb\.inv_freq$|(^|\.)freqs_(cos|sin)$")

# MindFormers' names of the same tensors, in the order of replacement.
_MINDFORMERS_NAMES: Final = (
    ("tok_embeddings.embedding_weight", "embed_tokens.weight"),
    (".attention.wq.", ".self_attn.q_proj."),
    (".attention.wk.", ".self_attn.k_proj."),
    (".attention.wv.", ".self_attn.v_proj."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("model.norm_out.", "model.norm."),
)


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(_NUMPY_DTYPES[self.dtype]).itemsize


class WeightReader:
    """The tensors of a folder by their Hugging Face names.

    A model takes each tensor it needs once, with the shape it expects, and calls `check_all_taken` at the end.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the headers.

        Raises:
            ModelError: No safetensors file, a file of the index is missing, or a header is malformed.
        """
        self._folder = folder
        self._tensors: dict[str, _StoredTensor] = {}
        for file in _weight_files(folder):
            for stored_name, tensor in _read_header(file).items():
                name = _hugging_face_name(stored_name)
                if name in self._tensors:
                    raise ModelError(f"{file}: tensor {name} stands twice, also in {self._tensors[name].file}")
                self._tensors[name] = tensor
        self._left = {name for name in self._tensors if not _IGNORED.search(name)}
        self._read_ahead: ReadAhead | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """One tensor, as stored: float32, float16, or bfloat16 as uint16 bits.

        Returns:
            A read-only memory map; pages are read as they are touched.

        Raises:
            ModelError: There is no such tensor, or it has another shape.
        """
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelError(f"{self._folder}: tensor {name} of shape {list(shape)} is missing")
        if stored.shape != shape:
            raise ModelError(
                f"{stored.file}: tensor {name} must have shape {list(shape)} by config.json. "
                f"Found: {list(stored.shape)}"
            )
        self._advance(name, stored)
        dtype = _NUMPY_DTYPES[stored.dtype]
        if not math.prod(shape):
            return np.empty(shape, dtype)
        return np.memmap(stored.file, dtype, mode="r", offset=stored.start, shape=shape)

    def take_rows(self, parts: Iterable[tuple[str, int]], *columns: int) -> Array:
        """Several tensors [rows, *columns], stacked along the rows: one product in place of several.

        Args:
            parts: Name and number of rows of each.
            columns: The remaining shape; none for vectors.
        """
        arrays = [self.take(name, (rows, *columns)) for name, rows in parts]
        if len({array.dtype for array in arrays}) > 1:
            arrays = [to_float32(array) for array in arrays]
        return np.concatenate(arrays)

    def check_all_taken(self) -> None:
        """Raises:
        ModelError: The folder holds tensors that the model did not ask for, so it is another model.
        """
        if self._read_ahead is not None:
            self._read_ahead.close()
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"{self._folder}: the model of config.json has no place for tensor {', '.join(names[:3])}{more}"
            )

    def _advance(self, name: str, stored: _StoredTensor) -> None:
        """Has the tensors after this one read while it is used, roughly in the order in which models take them."""
        if self._read_ahead is None and self.num_bytes >= _LEAST_READ_AHEAD:
            following = [self._tensors[each] for each in sorted(self._left, key=_model_order)]
            self._read_ahead = ReadAhead(Extent(each.file, each.start, each.num_bytes) for each in following)
            weakref.finalize(self, self._read_ahead.close)  # where the model turns out to be another one
        if self._read_ahead is not None and name in self._left:
            self._read_ahead.taken(stored.num_bytes)
        self._left.discard(name)


def _model_order(name: str) -> tuple[bool, bool, list[int], str]:
    """Embedding, layers by their numbers, and what follows them."""
    return "embed" not in name, "layers" not in name, [int(number) for number in re.findall(r"\d+", name)], name


def to_float32(array: Array) -> NDArray[np.float32]:
    """Widens stored elements exactly; a bfloat16 is the upper half of the float32 of the same value."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.exists():
        content = read_regular(index, _MAX_INDEX_BYTES)
        try:
            weight_map = json.loads(content.decode())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{index} must hold a JSON object with `weight_map`: {error!r}") from error
        for name in names:
            # The index comes with the weights: it may name its neighbours only.
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(f"{index}: `weight_map` must name files of its own folder. Given: {shorten(name)}")
            if not (folder / name).exists():
                raise ModelError(f"{folder}: {name} is missing; {INDEX_NAME} names it")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    hint = f"; {others[0]} must be converted to safetensors first" if others else ""
    raise ModelError(f"{folder} holds no *.safetensors file{hint}")


def _read_header(file: Path) -> dict[str, _StoredTensor]:
    """Name -> tensor of one file; every extent lies in the file and is no other tensor's."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        header_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{file} is not a safetensors file or is cut short: header of {header_bytes} bytes")
        content = stream.read(header_bytes)
    try:
        header = json.loads(content, object_pairs_hook=_distinct)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _stored_tensor(file, name, entry, 8 + header_bytes, size) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is not a safetensors file: {error!r}") from error
    _check_apart(file, tensors)
    return tensors


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; two readers of one that has a name twice may see two models."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _stored_tensor(file: Path, name: str, entry: dict[str, Any], data_start: int, file_size: int) -> _StoredTensor:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _NUMPY_DTYPES:
        raise ModelError(f"{file}: tensor {name} must be {', '.join(_NUMPY_DTYPES)}. Found: {shorten(dtype)}")
    if len(shape) > _MAX_DIMENSIONS or any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        rule = f"must have at most {_MAX_DIMENSIONS} lengths and two offsets, integers >= 0"
        raise ModelError(f"{file}: tensor {name} {rule}. Found: {shorten(shape)}, {shorten((start, end))}")
    tensor = _StoredTensor(file, dtype, shape, data_start + start)
    num_bytes = tensor.num_bytes
    if end - start != num_bytes or data_start + end > file_size:
        raise ModelError(
            f"{file}: tensor {name} of {shorten(num_bytes)} bytes must lie within the file of {file_size}. "
            f"Found: bytes {shorten(start)} to {shorten(end)} of the data"
        )
    return tensor


def _check_apart(file: Path, tensors: Mapping[str, _StoredTensor]) -> None:
    ordered = sorted(((each.start, each.num_bytes, name) for name, each in tensors.items() if each.num_bytes))
    for (start, num_bytes, name), (next_start, _, next_name) in itertools.pairwise(ordered):
        if next_start < start + num_bytes:
            raise ModelError(f"{file}: tensors {name} and {next_name} must not share bytes")


def _hugging_face_name(name: str) -> str:
    for theirs, ours in _MINDFORMERS_NAMES:
        name = name.replace(theirs, ours)
    return name
