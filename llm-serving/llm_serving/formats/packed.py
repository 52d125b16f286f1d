"""A weight that lies in several tensors: codes, scales and zeros, which a scheme of quantisation puts together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llm_serving.errors import ModelError
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, StoredTensor

Parts = Mapping[str, StoredTensor]
"""Ending of a name -> tensor, such as `qweight` and `scales`."""
Unpack = Callable[[Mapping[str, Array]], QuantizedTensor | Array]


@dataclass(frozen=True)
class PackedTensor:
    """A matrix of a quantised model; nothing is read before it is asked for.

    Attributes:
        name: Of the matrix, as an unquantised model has it.
        shape: (out, in)
        stored: What it lies in.
        unpack: The arrays of `stored` -> codes and scales; or float32 values, where they are no such thing.
    """

    name: str
    shape: tuple[int, ...]
    stored: Parts
    unpack: Unpack

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The tensors of the file that make this one."""
        return tuple(self.stored.values())

    @property
    def num_bytes(self) -> int:
        """As stored."""
        return sum(part.num_bytes for part in self.parts)

    def read_packed(self) -> QuantizedTensor | Array:
        """Codes and scales where they are such that a product can be made of them, else float32 values.

        Raises:
            ModelError: Numbers of the file contradict each other.
        """
        try:
            return self.unpack({ending: part.read() for ending, part in self.stored.items()})
        except ModelError as error:
            raise ModelError(f"{self.file}: {self.name}: {error}") from None

    def read(self) -> Array:
        """The values [out, in], float32."""
        found = self.read_packed()
        return found.dequantized() if isinstance(found, QuantizedTensor) else found


ReadableTensor = StoredTensor | PackedTensor


class Scheme(Protocol):
    """How the weights of a model are quantised.

    Attributes:
        described: For people: "GPTQ, 4 bits, groups of 128".
        activation_bits: Of the rows that such weights are multiplied by, as the model was made for; None: those of the
            model dtype.
    """

    @property
    def described(self) -> str: ...

    @property
    def activation_bits(self) -> int | None: ...

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        """The tensors of files as those of a model that is not quantised, by the names and shapes of such a one.

        Raises:
            ModelError: A part of a weight is missing, or is of another type or shape than the others ask for.
        """
        ...


def put_together(
    tensors: Mapping[str, ReadableTensor], endings: Collection[str], pack: Callable[[str, Parts], ReadableTensor]
) -> dict[str, ReadableTensor]:
    """Joins what has the same name up to its ending to one tensor, `<name>.weight`; all others stay what they are.

    Args:
        tensors: Of the files.
        endings: Of names of parts.
        pack: Name of a weight and its parts -> the weight.

    Raises:
        ModelError: As `pack`, or a tensor is left that is of no type a model is computed in.
    """
    weights: dict[str, ReadableTensor] = {}
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, ending = name.rpartition(".")
        if ending in endings and isinstance(tensor, StoredTensor):
            modules[module][ending] = tensor
        else:
            weights[name] = tensor
    for module, parts in modules.items():
        name = f"{module}.weight"
        if name in weights:
            raise ModelError(f"{weights[name].file}: tensor {name} stands twice, also as {', '.join(sorted(parts))}")
        weights[name] = pack(name, parts)
    for name, tensor in weights.items():
        if isinstance(tensor, StoredTensor) and tensor.dtype not in NUMPY_DTYPES:
            raise ModelError(f"{tensor.file}: tensor {name} must be {', '.join(NUMPY_DTYPES)}. Found: {tensor.dtype}")
    return weights


def part(name: str, parts: Parts, ending: str, dtypes: Collection[str], num_dimensions: int = 2) -> StoredTensor:
    """One part of a weight.

    Raises:
        ModelError: It is missing, of another type or of another number of lengths.
    """
    found = parts.get(ending)
    if found is None:
        file = next(iter(parts.values())).file
        raise ModelError(f"{file}: {name} has {', '.join(sorted(parts))} and must have {ending}")
    if found.dtype not in dtypes or len(found.shape) != num_dimensions:
        rule = f"must be {' or '.join(dtypes)} of {num_dimensions} lengths"
        raise ModelError(f"{found.file}: {name}: {ending} {rule}. Found: {found.dtype} {list(found.shape)}")
    return found


def check_shape(name: str, parts: Parts, ending: str, shape: tuple[int, ...]) -> None:
    """Raises:
    ModelError: The part has another shape.
    """
    found = parts[ending]
    if found.shape != shape:
        rule = f"must have shape {list(shape)} by its other parts"
        raise ModelError(f"{found.file}: {name}: {ending} {rule}. Found: {list(found.shape)}")
