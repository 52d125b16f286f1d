"""Weights of a model folder, memory-mapped, one tensor at a time, by their Hugging Face names.

`formats` reads the files. Nothing of the folder is executed.

Reading files into the system's cache before somebody maps them.

Several threads that touch the pages of a mapping have them read in small pieces in no order, slower than the disk is.

Whether a folder holds the weights of its config.json: asked by `config check`, by a start and by every WorkAgent.

By what a model is known from another of the same shape, without all of it being read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError
from llm_serving.formats.folder import DERIVED, INDEX_NAME, check_tensors, read_tensors, weight_files
from llm_serving.formats.mindformers_names import ORDERS, are_of_mindformers, hugging_face_name, is_joined, order_of
from llm_serving.formats.packed import PackedTensor, ReadableTensor, Scheme
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import Array, is_finite
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import CONFIG_NAME, ModelSpec

MOST_AHEAD: Final = 1 << 30
"""Bytes read before they are wanted, at most: what is far ahead may be gone again when memory is short."""

_AT_ONCE: Final = 1 << 23


@dataclass(frozen=True, slots=True)
class Extent:
    file: Path
    start: int
    num_bytes: int


class ReadAhead:
    """Reads extents one after another in a thread of its own; what cannot be read is left to who wants it."""

    def __init__(self, extents: Iterable[Extent], most_ahead: int = MOST_AHEAD) -> None:
        self._most_ahead = most_ahead
        self._num_read = 0
        self._num_taken = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(list(extents),), name="read-ahead", daemon=True)
        self._thread.start()

    @property
    def num_read(self) -> int:
        """Bytes read so far."""
        return self._num_read

    def taken(self, num_bytes: int) -> None:
        """Somebody has got to bytes, whichever: as many more may be read. Nobody waits for the thread."""
        with self._changed:
            self._num_taken += num_bytes
            self._changed.notify()

    def close(self) -> None:
        """Reads nothing further; the thread has ended when this returns."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self, extents: list[Extent]) -> None:
        buffer = memoryview(bytearray(_AT_ONCE))
        for extent in extents:
            with contextlib.suppress(OSError), extent.file.open("rb", buffering=0) as stream:
                for start in range(0, extent.num_bytes, _AT_ONCE):
                    if not self._may_read():
                        return
                    count = min(_AT_ONCE, extent.num_bytes - start)
                    os.preadv(stream.fileno(), [buffer[:count]], extent.start + start)
                    self._num_read += count

    def _may_read(self) -> bool:
        """Waits while it is too far ahead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._num_read < self._num_taken + self._most_ahead)
            return not self._closed


__all__ = ["INDEX_NAME", "WeightReader"]

_BASE: Final = "model."
_WITHOUT_BASE: Final = "embed_tokens.weight"
"""Embedding models are stored without their head, and then without the prefix that tells the two apart."""

# Below this, reading ahead saves less than a thread costs.
_LEAST_READ_AHEAD: Final = 1 << 26


class WeightReader:
    """The tensors of a folder by their Hugging Face names.

    A model takes each tensor it needs once, with the shape it expects, and calls `check_all_taken` at the end.
    """

    def __init__(
        self, folder: Path, scheme: Scheme | None = None, on_taken: Callable[[int, int], None] | None = None
    ) -> None:
        """Reads the headers.

        Args:
            folder: The folder.
            scheme: How its weights are quantised.
            on_taken: Is told the bytes of the tensors taken until now, and of all, whenever one is taken.

        Raises:
            ModelError: No safetensors file, a file of the index is missing, or a header is malformed.
        """
        self._folder = folder
        self._tensors: dict[str, ReadableTensor] = {}
        files = read_tensors(folder, packed=scheme is not None)
        stored: Mapping[str, ReadableTensor] = files if scheme is None else scheme.weights(files)
        theirs = are_of_mindformers(stored)
        prefix = _BASE if _WITHOUT_BASE in stored else ""
        for stored_name, tensor in stored.items():
            if theirs and is_joined(stored_name):
                order = "" if order_of(stored_name) else f" --joined {'|'.join(ORDERS)}"
                why = " in an order that no file tells" if order else ""
                raise ModelError(
                    f"{tensor.file}: {stored_name} holds several projections{why}: "
                    f"`llm-serving convert {folder} OUT --to hf{order}` takes them apart"
                )
            name = hugging_face_name(stored_name) if theirs else prefix + stored_name
            if name in self._tensors:
                raise ModelError(f"{tensor.file}: tensor {name} stands twice, also in {self._tensors[name].file}")
            self._tensors[name] = tensor
        self._left = {name for name in self._tensors if not DERIVED.search(name)}
        self._read_ahead: ReadAhead | None = None
        self._on_taken = on_taken
        self._num_taken = 0
        """Bytes."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def spare_biases(self) -> dict[str, tuple[int, ...]]:
        """Biases of quantised weights that hold nothing but zeros: some exporters write one for every layer."""
        found = {name: tensor for name, tensor in self._tensors.items() if name.endswith(".bias")}
        return {
            name: tensor.shape
            for name, tensor in found.items()
            if isinstance(self._tensors.get(f"{name.removesuffix('bias')}weight"), PackedTensor)
            and not tensor.read().any()
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """One tensor, as stored: float32, float16, or bfloat16 as uint16 bits; of quantised ones the values.

        Returns:
            A read-only memory map, whose pages are read as they are touched; of a quantised one an array, float32.

        Raises:
            ModelError: There is no such tensor, or it has another shape.
        """
        return self._take(name, shape).read()

    def take_packed(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor | Array:
        """As `take`, with the codes and scales of what is quantised so."""
        found = self._take(name, shape)
        return found.read_packed() if isinstance(found, PackedTensor) else found.read()

    def first_not_finite(self, names: Sequence[str]) -> str:
        """File and name of the first of these tensors with an element that is infinite or no number; "" if none has."""
        for name in names:
            tensor = self._tensors[name]
            if not is_finite(np.ascontiguousarray(tensor.read())):
                return f"{tensor.file}: {name}"
        return ""

    def _take(self, name: str, shape: tuple[int, ...]) -> ReadableTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelError(f"{self._folder}: tensor {name} of shape {list(shape)} is missing")
        if stored.shape != shape:
            raise ModelError(
                f"{stored.file}: tensor {name} must have shape {list(shape)} by config.json. "
                f"Found: {list(stored.shape)}"
            )
        self._advance(name, stored)
        return stored

    def leave(self, name: str) -> None:
        """The model has no use for this tensor, and it may be there."""
        self._left.discard(name)

    def check_all_taken(self) -> None:
        """Raises:
        ModelError: The folder holds tensors that the model did not ask for, so it is another model.
        """
        if self._read_ahead is not None:
            self._read_ahead.close()
        if left := self._left and self._left - self.spare_biases().keys():
            names = sorted(left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"{self._folder}: the model of config.json has no place for tensor {', '.join(names[:3])}{more}"
            )

    def _advance(self, name: str, stored: ReadableTensor) -> None:
        """Has the tensors after this one read while it is used, roughly in the order in which models take them."""
        if self._read_ahead is None and self.num_bytes >= _LEAST_READ_AHEAD:
            following = [self._tensors[each] for each in sorted(self._left, key=_model_order)]
            parts = [part for each in following for part in each.parts]
            self._read_ahead = ReadAhead(Extent(part.file, *piece) for part in parts for piece in part.pieces)
            weakref.finalize(self, self._read_ahead.close)  # where the model turns out to be another one
        if self._read_ahead is not None and name in self._left:
            self._read_ahead.taken(stored.num_bytes)
        self._left.discard(name)
        if self._on_taken is not None:
            self._num_taken += stored.num_bytes
            self._on_taken(self._num_taken, self.num_bytes)


def _model_order(name: str) -> tuple[bool, bool, list[int], str]:
    """Embedding, layers by their numbers, and what follows them."""
    return "embed" not in name, "layers" not in name, [int(number) for number in re.findall(r"\d+", name)], name


def check_folder(folder: Path) -> ModelSpec:
    """Reads config.json and the headers of the weights, and no weight.

    Returns:
        The model.

    Raises:
        ModelError: A form that is not read, a damaged file, or other tensors than the model has.
    """
    spec = ModelSpec.from_folder(folder)
    reader = WeightReader(folder, spec.scheme)
    spare = {**reader.spare_biases(), **spare_tensors(spec)}
    check_tensors(str(folder), spec.tensors, reader.shapes(), spare)
    return spec


def spare_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """What may be there besides: some exporters write a tied table twice."""
    return dict.fromkeys(spec.network.optional, (spec.vocab_size, spec.network.hidden))


WHOLE_BYTES: Final = 2**20
"""A file of no more is read whole."""
SAMPLE_BYTES: Final = 4096
EVERY_BYTES: Final = 2**22
"""Of a longer one a sample in so many bytes is, and its end: 16 MB of a model of 16 GB."""


def sketch_of(model: Path) -> str:
    """A hash over names and sizes of the files of a model, and over samples of what they hold.

    Args:
        model: Folder or GGUF file, wherever it lies.

    Raises:
        ModelError: One cannot be read, or there are none.
    """
    names = [model] if is_gguf(model) else [model / CONFIG_NAME, model / INDEX_NAME, *weight_files(model)]
    sketch = hashlib.sha256()
    for path in sorted(each for each in names if each.exists()):
        _add(sketch, path)
    return sketch.hexdigest()


def _add(sketch: hashlib._Hash, path: Path) -> None:
    with open_regular(path) as file:
        try:
            size = file.seek(0, 2)
            sketch.update(f"\0{path.name} {size}\0".encode())
            width, every = (size, max(size, 1)) if size <= WHOLE_BYTES else (SAMPLE_BYTES, EVERY_BYTES)
            for start in (*range(0, size, every), max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                sketch.update(file.read(width))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
