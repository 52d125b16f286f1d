"""Weights stored as several tensors (quantized values, scales, zero points), and the schemes that combine them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import ModelError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.formats.quantized_tensor import QuantizedTensor, QValuesForm, unrotated
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, StoredTensor

Parts = Mapping[str, StoredTensor]
"""Name ending -> tensor, such as `qweight` and `scales`."""
Quantized = QuantizedTensor | BlockTensor
Unpack = Callable[[Mapping[str, Array]], Quantized | Array]


@dataclass(frozen=True)
class PackedTensor:
    """A weight of a quantized model, which is read from its file only on access.

    Attributes:
        name, shape: Name and shape of the weight in an unquantized model.
        unpack: Converts the file's arrays to quantized values, or to float32 if no kernel can use quantized ones.
        order: Indices of this weight's rows in the unpacked matrix, or None if the rows keep their order.
    """

    name: str
    shape: tuple[int, ...]
    stored: Parts
    unpack: Unpack
    order: Array | None = None

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return tuple(self.stored.values())

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def read_packed(self) -> Quantized | Array:
        """Return quantized values and scales, or float32 values if no kernel can use the quantized ones."""
        try:
            found = self.unpack({ending: part.read() for ending, part in self.stored.items()})
        except ModelError as error:
            raise ModelError(f"{self.file}: {self.name}: {error}") from None
        if self.order is None:
            return found
        assert not isinstance(found, QuantizedTensor)
        return found.select(self.order) if isinstance(found, BlockTensor) else found[self.order]

    def read(self) -> Array:
        return unquantized(self.read_packed(), self.shape)


def unquantized(found: Quantized | Array, shape: tuple[int, ...]) -> Array:
    """Return `found` in floating point and in shape `shape`. Experts are transposed: quantized ones are [experts * out,
    in], and the result is [experts, in, out].
    """
    if not isinstance(found, Quantized):
        return found
    values = found.dequantized()
    if isinstance(found, QuantizedTensor) and found.rotated:
        values = unrotated(values)
    if len(shape) == 2:
        return values
    count, width, out = shape
    return values.reshape(count, out, width).swapaxes(1, 2)


ReadableTensor = StoredTensor | PackedTensor


class Scheme(ABC):
    """The format in which a model stores quantized weights.

    Attributes:
        description: Text for the user, such as "GPTQ, 4 bits, groups of 128".
        activation_bits: Bits of the activations for which the model was quantized. None means the model dtype.
        form: Layout of the stored integers, except those of `in_8_bits`. None if weights are floating point, in GGUF
            blocks or in several layouts.
        in_8_bits: Modules whose weights have 8 bits and a scale for each row, while others have 4 bits.
    """

    description: str
    activation_bits: int | None = None
    in_8_bits: frozenset[str] = frozenset()

    @property
    def form(self) -> QValuesForm | None:
        return None

    @abstractmethod
    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        """Return the weights of the unquantized model, assembled from the stored tensors."""


def assemble_weights(
    tensors: Mapping[str, ReadableTensor], endings: Collection[str], pack: Callable[[str, Parts], ReadableTensor]
) -> dict[str, ReadableTensor]:
    """Combine the parts of each weight by `pack`. `endings`: names of parts, such as `qweight`. Keep other tensors."""
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
            raise ModelError(
                f"{weights[name].file}: tensor {name} occurs twice: under this name, and as {', '.join(sorted(parts))}"
            )
        weights[name] = pack(name, parts)
    return check_plain(weights)


def check_plain(weights: dict[str, ReadableTensor]) -> dict[str, ReadableTensor]:
    """Return `weights`. Raise ModelError if an unquantized one is not float32, float16 or bfloat16."""
    for name, tensor in weights.items():
        if isinstance(tensor, StoredTensor) and tensor.dtype not in NUMPY_DTYPES:
            raise ModelError(f"{tensor.file}: tensor {name} must be {', '.join(NUMPY_DTYPES)}. Found: {tensor.dtype}")
    return weights


def part(name: str, parts: Parts, ending: str, dtypes: Collection[str], num_dimensions: int = 2) -> StoredTensor:
    """Return part `ending` of a weight. Raise ModelError if it is missing, or has the wrong dtype or dimensions."""
    found = parts.get(ending)
    if found is None:
        file = next(iter(parts.values())).file
        raise ModelError(f"{file}: {name} has {', '.join(sorted(parts))}, but must also have {ending}")
    if found.dtype not in dtypes or len(found.shape) != num_dimensions:
        rule = f"must be {' or '.join(dtypes)} with {num_dimensions} dimensions"
        raise ModelError(f"{found.file}: {name}: {ending} {rule}. Found: {found.dtype} {list(found.shape)}")
    return found


def check_shape(name: str, parts: Parts, ending: str, shape: tuple[int, ...]) -> None:
    found = parts[ending]
    if found.shape != shape:
        rule = f"must have shape {list(shape)} by its other parts"
        raise ModelError(f"{found.file}: {name}: {ending} {rule}. Found: {list(found.shape)}")
