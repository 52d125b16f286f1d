"""Reads the header of a safetensors file. The package safetensors is not used: it has no NumPy dtype for bfloat16.

A file consists of the length of the header (8 bytes, little-endian), the header in JSON, and the data of the tensors.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, PACKED_DTYPES, StoredTensor, check_apart

_MAX_HEADER_BYTES: Final = 32 * 2**20
_LFS_POINTER: Final = b"version "
_MAX_DIMENSIONS: Final = 8
_NO_WEIGHT: Final = re.compile(r"^__metadata__$|(^|\.)position_ids$")
"""Pattern of header entries that are not weights, such as `position_ids`, which older encoders store."""


def read_safetensors(file: Path, packed: bool = False) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name. `packed` also allows dtypes that only quantized weights have. Raise
    ModelError if the file is truncated or no safetensors file, or if tensors overlap or have an unsupported dtype.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        first_bytes = stream.read(8)
        header_bytes = int.from_bytes(first_bytes, "little")
        if first_bytes == _LFS_POINTER:
            raise ModelError(f"{file} is a Git LFS pointer, not a weight file: run `git lfs pull` in its folder")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            what = f"header of {header_bytes} bytes in {size}; download it again"
            raise ModelError(f"{file} is not a safetensors file or is truncated: {what}")
        content = stream.read(header_bytes)
    try:
        header = json.loads(content, object_pairs_hook=_distinct)
        entries = {name: entry for name, entry in header.items() if not _NO_WEIGHT.search(name)}
        dtypes = (*NUMPY_DTYPES, *PACKED_DTYPES) if packed else tuple(NUMPY_DTYPES)
        start = 8 + header_bytes
        tensors = {name: _stored_tensor(file, start, size, dtypes, name, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is not a safetensors file: {error!r}") from error
    check_apart(file, tensors.items())
    return tensors


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raise ValueError for duplicate names, because readers differ in which value they use."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in a JSON object of the header")
    return found


def _stored_tensor(
    file: Path, data_start: int, file_size: int, dtypes: tuple[str, ...], name: str, entry: dict[str, Any]
) -> StoredTensor:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in dtypes:
        raise ModelError(f"{file}: tensor {name} must be {', '.join(dtypes)}. Found: {shorten(dtype)}")
    if len(shape) > _MAX_DIMENSIONS or any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        rule = f"must have at most {_MAX_DIMENSIONS} dimensions and two data offsets, all integers >= 0"
        raise ModelError(
            f"{file}: tensor {name} {rule}. Found: shape {shorten(shape)}, offsets {shorten((start, end))}"
        )
    tensor = StoredTensor(file, dtype, shape, ((data_start + start, end - start),))
    num_bytes = tensor.num_bytes
    if end - start != num_bytes or data_start + end > file_size:
        raise ModelError(
            f"{file}: tensor {name} of {shorten(num_bytes)} bytes must lie within the file of {file_size} bytes. "
            f"Found: bytes {shorten(start)} to {shorten(end)} of the data"
        )
    return tensor
