"""The weights of a model folder: memory-mapped tensors by their Hugging Face names, read ahead into the page cache.

Compute threads access a memory map in small pieces and in random order, which is slower than the disk allows.
Therefore `ReadAhead` reads the files sequentially into the page cache, ahead of these threads. It copies no bytes: the
system sends them from the page cache to the null device.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError
from llm_serving.formats.folder import DERIVED, INDEX_NAME, check_tensors, read_tensors, weight_files
from llm_serving.formats.gguf import files_of
from llm_serving.formats.mindformers_names import ORDERS, are_of_mindformers, hugging_face_name, is_fused
from llm_serving.formats.packed import PackedTensor, Quantized, ReadableTensor, Scheme
from llm_serving.formats.stored_tensor import Array, is_finite
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import CONFIG_NAME, ModelSpec

MAX_READ_AHEAD_BYTES: Final = 1 << 30
"""Maximum bytes to read ahead. The system may evict pages that are read too early."""

_AT_ONCE: Final = 1 << 23


class Extent(NamedTuple):
    file: Path
    start: int
    num_bytes: int


class ReadAhead:
    """Reads ranges of files in order, in its own thread. It ignores errors, which the model's own read then reports."""

    def __init__(self, extents: Iterable[Extent], max_ahead: int = MAX_READ_AHEAD_BYTES) -> None:
        self._max_ahead = max_ahead
        self.num_read = 0
        self._num_consumed = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(list(extents),), name="read-ahead", daemon=True)
        self._thread.start()

    def consumed(self, num_bytes: int) -> None:
        """Advance the read-ahead window by the bytes consumed. Never blocks."""
        with self._changed:
            self._num_consumed += num_bytes
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self, extents: list[Extent]) -> None:
        with contextlib.suppress(OSError), Path(os.devnull).open("wb", buffering=0) as nowhere:
            for extent in extents:
                with contextlib.suppress(OSError), extent.file.open("rb", buffering=0) as stream:
                    for start in range(0, extent.num_bytes, _AT_ONCE):
                        if not self._may_read():
                            return
                        count = min(_AT_ONCE, extent.num_bytes - start)
                        _load(stream.fileno(), extent.start + start, count, nowhere.fileno())
                        self.num_read += count

    def _may_read(self) -> bool:
        """Wait while the thread is more than `max_ahead` bytes ahead. Return False after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.num_read < self._num_consumed + self._max_ahead)
            return not self._closed


def _load(file: int, start: int, num_bytes: int, nowhere: int) -> None:
    try:
        os.sendfile(nowhere, file, start, num_bytes)
    except OSError:  # some file systems cannot send
        os.pread(file, num_bytes, start)


__all__ = ["INDEX_NAME", "WeightReader"]

_BASE: Final = "model."
_WITHOUT_BASE: Final = "embed_tokens.weight"
"""Tensor of embedding models without LM head, whose folders have no `model.` prefix."""
_ENCODER_BASES: Final = ("bert.", "roberta.", "model.")
"""Tensor name prefixes of encoders with a head. Encoders that are saved without a head have none."""
_ENCODER_TABLES: Final = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")

# For smaller models, reading ahead saves less time than the thread costs.
_MIN_READ_AHEAD_BYTES: Final = 1 << 26


class WeightReader:
    """The tensors of a folder by Hugging Face name. A model reads each tensor once, then calls `check_all_read`."""

    def __init__(
        self, folder: Path, scheme: Scheme | None = None, on_read: Callable[[int, int], None] | None = None
    ) -> None:
        """Read the headers of files, or raise ModelError. After each tensor, `on_read` gets (bytes so far, total)."""
        self._folder = folder
        self._tensors: dict[str, ReadableTensor] = {}
        files = read_tensors(folder, packed=scheme is not None)
        stored: Mapping[str, ReadableTensor] = files if scheme is None else scheme.weights(files)
        theirs = are_of_mindformers(stored)
        prefix = _BASE if _WITHOUT_BASE in stored else ""
        base = next((each for each in _ENCODER_BASES if any(each + name in stored for name in _ENCODER_TABLES)), "")
        for stored_name, tensor in stored.items():
            if theirs and is_fused(stored_name):
                raise ModelError(
                    f"{tensor.file}: {stored_name} holds several projections, and no file states their order: "
                    f"`llm-serving convert {folder} OUT --to hf --joined {'|'.join(ORDERS)}` separates them"
                )
            name = hugging_face_name(stored_name) if theirs else prefix + stored_name.removeprefix(base)
            if name in self._tensors:
                raise ModelError(f"{tensor.file}: tensor {name} occurs twice: {self._tensors[name].file} has it too")
            self._tensors[name] = tensor
        self._unread = {name for name in self._tensors if not DERIVED.search(name)}
        self._read_ahead: ReadAhead | None = None
        self._on_read = on_read
        self._num_consumed = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def zero_biases(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the biases of quantized weights that are all zeros. Some exporters add them."""
        found = {name: tensor for name, tensor in self._tensors.items() if name.endswith(".bias")}
        return {
            name: tensor.shape
            for name, tensor in found.items()
            if isinstance(self._tensors.get(f"{name.removesuffix('bias')}weight"), PackedTensor)
            and not tensor.read().any()
        }

    @cached_property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return one tensor as stored, in a read-only memory map. A quantized tensor becomes float32."""
        return self._find(name, shape).read()

    def read_packed(self, name: str, shape: tuple[int, ...]) -> Quantized | Array:
        found = self._find(name, shape)
        return found.read_packed() if isinstance(found, PackedTensor) else found.read()

    def first_non_finite(self, names: Sequence[str]) -> str:
        """Return file and name of the first tensor with an infinite or NaN element, or "" if there is none."""
        for name in names:
            tensor = self._tensors[name]
            if not is_finite(np.ascontiguousarray(tensor.read())):
                return f"{tensor.file}: {name}"
        return ""

    def _find(self, name: str, shape: tuple[int, ...]) -> ReadableTensor:
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

    def ignore(self, name: str) -> None:
        """Accept a tensor that the model does not use. A name that ends with a dot is a prefix of several tensors."""
        self._unread -= {each for each in self._unread if is_optional(each, (name,))}

    def expect_only(self, names: Collection[str]) -> None:
        self._unread &= set(names)

    def check_all_read(self) -> None:
        """Raise ModelError if the folder has unread tensors, because it then holds a different model."""
        if self._read_ahead is not None:
            self._read_ahead.close()
        if unread := self._unread and self._unread - self.zero_biases().keys():
            names = sorted(unread)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            listed = f"{', '.join(names[:3])}{more}"
            raise ModelError(f"{self._folder}: the model of config.json does not have these stored tensors: {listed}")

    def _advance(self, name: str, stored: ReadableTensor) -> None:
        """Start or advance reading ahead, in roughly the order in which models read tensors."""
        if self._read_ahead is None and self.num_bytes >= _MIN_READ_AHEAD_BYTES:
            following = [self._tensors[each] for each in sorted(self._unread, key=_model_order)]
            parts = [part for each in following for part in each.parts]
            self._read_ahead = ReadAhead(Extent(part.file, *piece) for part in parts for piece in part.pieces)
            weakref.finalize(self, self._read_ahead.close)  # for a reader that is dropped after an error
        if self._read_ahead is not None and name in self._unread:
            self._read_ahead.consumed(stored.num_bytes)
        self._unread.discard(name)
        if self._on_read is not None:
            self._num_consumed += stored.num_bytes
            self._on_read(self._num_consumed, self.num_bytes)


def _model_order(name: str) -> tuple[bool, bool, list[int], str]:
    return "embed" not in name, "layers" not in name, [int(number) for number in re.findall(r"\d+", name)], name


def check_folder(folder: Path) -> ModelSpec:
    spec = ModelSpec.from_folder(folder)
    reader = WeightReader(folder, spec.scheme)
    spare = {**reader.zero_biases(), **optional_tensors(spec, reader.shapes())}
    check_tensors(str(folder), spec.tensors, reader.shapes(), spare)
    return spec


def mtp_layer(spec: ModelSpec, reader: WeightReader, folder: Path) -> ModelSpec:
    """Return the spec of the multi-token prediction (MTP) layer. Raise ModelError if it or its tensors are missing."""
    rule = "scheduler_config.speculative_method: mtp needs a layer for multi-token prediction"
    stored = reader.shapes()
    layer = spec.mtp(stored)
    if layer is None:
        raise ModelError(
            f"{rule}: according to its config.json, this {spec.architecture} has no such layer, or an unsupported one"
        )
    missing = [name for name in layer.tensors if name not in stored]
    if missing:
        raise ModelError(f"{rule}: {folder} lacks {len(missing)} of {len(layer.tensors)} tensors, such as {missing[0]}")
    return layer


def check_replacement(folder: Path, old: ModelSpec) -> None:
    """Raise ModelError if a folder is damaged, or if its architecture, configuration or a shape differs from `old`."""
    new = check_folder(folder)
    if new.architecture != old.architecture:
        raise ModelError(f"{folder}: the architecture must be {old.architecture}, as served. Given: {new.architecture}")
    for key in sorted({*new.config, *old.config} - _FREE_KEYS):
        if (given := new.config.get(key)) != (served_value := old.config.get(key)):
            raise ModelError(f"{folder}: `{key}` of config.json must be {served_value}, as served. Given: {given}")


_FREE_KEYS: Final = frozenset(("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"))


def optional_tensors(spec: ModelSpec, found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of `found` that the model may have but does not use, such as a second copy of an embedding."""
    head = (spec.vocab_size, spec.network.hidden)
    optional = spec.network.optional
    return {name: head if name in optional else shape for name, shape in found.items() if is_optional(name, optional)}


def is_optional(name: str, optional: Collection[str]) -> bool:
    return name in optional or any(each.endswith(".") and name.startswith(each) for each in optional)


WHOLE_BYTES: Final = 2**20
"""Files up to this size are hashed completely."""
SAMPLE_BYTES: Final = 4096
EVERY_BYTES: Final = 2**22
"""Distance between the samples of a larger file, whose end is sampled too. A model of 16 GB has 16 MB of samples."""


def weight_fingerprint(model: Path) -> str:
    """Return a hash of names, sizes and sampled contents of a model's files. Raise ModelError if one cannot be read."""
    names = files_of(model) if is_gguf(model) else [model / CONFIG_NAME, model / INDEX_NAME, *weight_files(model)]
    digest = hashlib.sha256()
    for path in sorted(each for each in names if each.exists()):
        _add(digest, path)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path) -> None:
    with open_regular(path) as file:
        try:
            size = file.seek(0, 2)
            digest.update(f"\0{path.name} {size}\0".encode())
            width, every = (size, max(size, 1)) if size <= WHOLE_BYTES else (SAMPLE_BYTES, EVERY_BYTES)
            for start in (*range(0, size, every), max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(width))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
