"""Measures on a text how much the results of a model change if one of its matrices is rounded to 4 bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mindspore as ms
import numpy as np
from llm_serving.backends.base import Array, AttentionShape
from llm_serving.backends.parameters import host_tensor, parameter_over
from llm_serving.backends.plain import PlainBackend, PlainStoreKV
from llm_serving.backends.weight_packing import quantize
from llm_serving.errors import ConfigError, ModelError
from llm_serving.formats.packed import unquantized
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.lowering.cells import CellNetwork
from llm_serving.lowering.parameters import parameters_of
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.operations import Float32Array, Weight
from llm_serving.network.weights import assemble_weight
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from mindspore import nn

WINDOW: Final = 64
NUM_WINDOWS: Final = 8
"""Number of windows that are read from the text."""
_AT_ONCE: Final = 8
"""Number of matrices measured in one pass. Each pass reads the first of them and all weights after it."""
_BLOCK_SIZE: Final = 16
_TINY: Final = np.float32(1e-30)

Product = Callable[[Float32Array, Weight], Float32Array]
OnMeasured = Callable[[int], object]


def windows_of(text: str, folder: Path, spec: ModelSpec) -> list[list[int]]:
    """Return `NUM_WINDOWS` windows of a text's tokens, spread evenly over it. Raise ConfigError if it is too short,
    or has tokens that the model does not know.
    """
    tokenizer = Tokenizer.load(folder)
    ids, begin = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode("")
    length = min(WINDOW, spec.max_position_embeddings) - len(begin)
    if len(ids) < NUM_WINDOWS * length:
        raise ConfigError(
            f"the text of --calibrate must have at least {NUM_WINDOWS * length} tokens. Given: {len(ids)}"
        )
    starts = [number * (len(ids) - length) // (NUM_WINDOWS - 1) for number in range(NUM_WINDOWS)]
    windows = [[*begin, *ids[start : start + length]] for start in starts]
    largest = max(map(max, windows))
    if largest >= spec.vocab_size:
        raise ConfigError(f"{folder}: the tokenizer gives id {largest}, but the model has {spec.vocab_size} embeddings")
    return windows


def quantize_rotated(weight: Array, bits: int, group_size: int | None) -> QuantizedTensor:
    return quantize(weight, bits, group_size, rotates=True)


class SensitivityNetwork:
    """Measures how sensitive a network's results are to the rounding of each weight. Raise ConfigError for a network
    with experts, with ALiBi or with operations that `PlainBackend` lacks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        reader: WeightReader,
        windows: Sequence[Sequence[int]],
        names: Collection[str],
        group_size: int,
    ) -> None:
        ms.set_device("CPU")
        ms.set_context(mode=ms.PYNATIVE_MODE)
        network, max_positions = spec.network, max(map(len, windows))
        kinds = {each.kind for each in network.operations}
        lacks = PlainBackend("float32").unsupported(network, max_positions)
        if lacks is None and "experts" in kinds:
            lacks = "experts"
        if lacks is None and any("slopes" in each.weights for each in network.operations):
            lacks = "ALiBi"
        if lacks is not None:
            raise ConfigError(f"--calibrate does not support {lacks}. Quantize this model without --calibrate")
        self._reader, self._windows, self._names, self._group_size = reader, windows, names, group_size
        self._backend = backend = _CalibrationBackend()
        parameters = parameters_of(network, backend, reader, max_positions, as_cells=True)
        backend.assign(parameters)
        caches = [backend.kv_cache(1, _BLOCK_SIZE, shape) for shape in network.caches]
        options = {"whole_prompts": True, "of_states": True, "all_rows": True}
        self._cell = CellNetwork(network, backend, parameters, caches, max_positions, **options)
        self._cell.set_train(False)

    def changes(self, on_measured: OnMeasured) -> dict[Weight, float]:
        """Return how much each weight changes the last hidden states if only this weight is rounded to 4 bits: the mean
        over all tokens of |change|^2 / |hidden state|^2. Weights with several tensors count as one, because their
        tensors must have the same bits. `on_measured` receives the number of tensors measured. Raise ModelError if the
        last hidden states are not finite.
        """
        results: list[tuple[Weight, Float32Array]] = []

        def record(x: Float32Array, weight: Weight) -> Float32Array:
            results.append((weight, x @ self._matrix(weight, self._stored(weight)).T))
            return results[-1][1]

        states, changes = self._states(record, 1), dict[Weight, float]()
        if not np.isfinite(states).all():
            raise ModelError("--calibrate: the model's last hidden states of the text must be finite numbers")
        squares = np.maximum(np.square(states).sum(1), _TINY)
        measured = [at for at, (weight, _) in enumerate(results) if all(name in self._names for name in weight.names)]
        for start in range(0, len(measured), _AT_ONCE):
            products = measured[start : start + _AT_ONCE]
            differences = self._states_with_rounded(results, products) - states
            for at, difference in zip(products, differences, strict=True):
                weight = results[at][0]
                changes[weight] = float((np.square(difference).sum(1) / squares).mean())
                on_measured(len(weight.names))
        return changes

    def _states_with_rounded(
        self, results: Sequence[tuple[Weight, Float32Array]], products: Sequence[int]
    ) -> Float32Array:
        """Return hidden states [len(products), tokens, width]. Entry i is computed with the weight of the product
        `products[i]` rounded to 4 bits. `products`: indices into `results`, which has the weight and the unrounded
        result of each product in order of execution.
        """
        numbers, count = itertools.count(), len(products)

        def product(x: Float32Array, weight: Weight) -> Float32Array:
            at = next(numbers)
            if at < products[0]:
                return np.tile(results[at][1], (count, 1))
            stored = self._stored(weight)
            found = x @ self._matrix(weight, stored).T
            if at in products:
                rounded = [quantize_rotated(each, 4, self._group_size) for each in stored]
                matrix = self._matrix(weight, [unquantized(each, each.shape) for each in rounded])
                copies = slice(products.index(at) * len(x) // count, (products.index(at) + 1) * len(x) // count)
                found[copies] = x[copies] @ matrix.T
            return found

        states = self._states(product, count)
        return states.reshape(count, -1, states.shape[1])

    def _stored(self, weight: Weight) -> list[Array]:
        return [self._reader.read(*each) for each in zip(weight.names, weight.stored_shapes, strict=True)]

    def _matrix(self, weight: Weight, stored: Sequence[Array]) -> Float32Array:
        return to_float32(assemble_weight(weight, stored))

    def _states(self, product: Product, num_copies: int) -> Float32Array:
        """Return the last hidden states of copies of the windows."""
        windows = [*self._windows] * num_copies
        self._backend.product = product
        lengths = np.array([len(window) for window in windows], np.int32)
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        tables, last = np.zeros((len(windows), 1), np.int32), np.zeros(1, np.int32)
        inputs = (np.concatenate(windows).astype(np.int32), positions, positions, tables, lengths, lengths, last)
        states: Float32Array = self._cell(*map(ms.Tensor, inputs)).asnumpy()
        return states


class _NoKVStore(PlainStoreKV):
    """Stores nothing: `_PromptAttention` takes the keys and values directly."""

    def construct(self, k: ms.Tensor, *others: Any) -> ms.Tensor:
        return k


class _CalibrationBackend(PlainBackend):
    """A backend whose linear operations call `product`. The Parameter of a linear weight is a placeholder with the
    weight's number, because weights are read from the file one at a time when they are used.
    """

    store_kv = _NoKVStore

    product: Product

    def __init__(self) -> None:
        super().__init__("float32")
        self._weights: dict[int, Weight] = {}
        self._num_placeholders = 0

    def linear(self) -> nn.Cell:
        return _Product(lambda x, number: self.product(x, self._weights[number]))

    def linear_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        self._num_placeholders += 1
        return parameter_over(np.full((1, 1), self._num_placeholders, np.float32), "float32", name)

    def tied_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        return self._copy(array, name)

    def assign(self, parameters: Mapping[Weight, Sequence[ms.Parameter]]) -> None:
        """Remember the weight of each placeholder."""
        placeholders = {weight: each for weight, (each, *_) in parameters.items() if each.shape == (1, 1)}
        self._weights = {int(each.asnumpy()[0, 0]): weight for weight, each in placeholders.items()}

    def prompt_attention(self, shape: AttentionShape) -> nn.Cell:
        return _PromptAttention(shape)


class _Product(nn.Cell):
    def __init__(self, product: Callable[[Float32Array, int], Float32Array]) -> None:
        super().__init__()
        self.product = product

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        return host_tensor(self.product(x.asnumpy(), int(weight.asnumpy()[0, 0])), "float32")


class _PromptAttention(nn.Cell):
    """Computes the attention of whole prompts in NumPy, one prompt and head at a time."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape

    def construct(self, q: ms.Tensor, k: ms.Tensor, v: ms.Tensor, lengths: ms.Tensor, _: ms.Tensor) -> ms.Tensor:
        queries, keys, values = (each.asnumpy() for each in (q, k, v))
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        width = values.shape[1] // num_kv_heads
        result = np.empty((len(queries), num_heads * width), np.float32)
        ends = np.cumsum(lengths.asnumpy())
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            q_heads, k_heads, v_heads = (
                each[start:end].reshape(end - start, heads, -1).swapaxes(0, 1)
                for each, heads in ((queries, num_heads), (keys, num_kv_heads), (values, num_kv_heads))
            )
            hidden = self._hidden(end - start)
            for head in range(num_heads):
                of_head = head * num_kv_heads // num_heads
                scores = q_heads[head] @ k_heads[of_head].T * np.float32(self.shape.scale)
                if self.shape.cap > 0:
                    scores = np.tanh(scores / self.shape.cap) * np.float32(self.shape.cap)
                scores[hidden] = -math.inf
                weights = np.exp(scores - scores.max(1, keepdims=True))
                weights /= weights.sum(1, keepdims=True)
                result[start:end, head * width : (head + 1) * width] = weights @ v_heads[of_head]
        return host_tensor(result, "float32")

    def _hidden(self, length: int) -> Array:
        distance = np.arange(length)[:, None] - np.arange(length)
        hidden: Array = distance < 0
        return hidden | (distance >= self.shape.window) if self.shape.window > 0 else hidden
