"""Weights of a model folder, memory-mapped, one tensor at a time, by their Hugging Face names.

`formats` reads the files. Nothing of the folder is executed.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.compare import DERIVED
from llm_serving.formats.folder import INDEX_NAME, read_tensors
from llm_serving.formats.mindformers import ORDERS, are_of_mindformers, hugging_face_name, is_joined, order_of
from llm_serving.formats.packed import PackedTensor, ReadableTensor, Scheme
from llm_serving.formats.quantized import QuantizedTensor
from llm_serving.formats.stored import Array, is_finite
from llm_serving.models.read_ahead import Extent, ReadAhead

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
