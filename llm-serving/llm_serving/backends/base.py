"""The interface of a backend: the operations of a decoder as Cells, and the Parameters that they use.

Shapes: T packed tokens of a step (the rows of its B requests in sequence, without padding), S sampled rows, H hidden
size, N output features, K input features, D head_dim, V vocabulary size, I intermediate size, W blocks in the widest
block table. First dimensions may be dynamic, so changing them causes no recompilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import nn

from llm_serving.backends.parameters import Array, BlockMemory, float32_parameter, to_model_dtype
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.step import Int32Array
from llm_serving.errors import ConfigError, ModelError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.network.builder import Network
from llm_serving.network.caches import CacheShape, StateShape
from llm_serving.network.operations import rounded_to
from llm_serving.network.weights import RowStack

__all__ = ["Array", "AttentionShape", "Backend", "BlockMemory", "model_dtype"]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention operation. `window` and `cap` as in `Network.attention`; 0: none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    cap: float = 0.0


class Backend(Protocol):
    """One implementation of a decoder's operations. Its Cells are cheap to create and take weights as arguments.

    A backend inherits the methods of operations that it lacks. Docstrings of methods that return a Cell state what it
    computes, as (arguments) -> result.
    """

    name: str
    attention_rows: int = 0
    """If not 0, attention computes each token as its own request, and steps have a multiple of this many rows."""

    dtype: str

    activation_dtype: Any
    """MindSpore dtype of activations, of cosines and sines, and of the result of `embedding`."""

    def unsupported(self, network: Network, num_positions: int) -> str | None:
        """Return the feature that the network needs and this backend's Cells lack; None: they lack none."""

    def embedding(self) -> nn.Cell:
        """Rows of a table from `table` or `linear_weight`: (token_ids int32[T], table [V, H]) -> [T, H]."""

    def rms_norm(self, eps: float) -> nn.Cell:
        """The norm of rows, in float32, rounded once: (x [T, H], gamma [H]) -> [T, H]."""

    def add_rms_norm(self, eps: float) -> nn.Cell:
        """(x [T, H], y [T, H], gamma [H]) -> (rms_norm of x + y, x + y). The sum is rounded before it is normalised."""

    def linear(self) -> nn.Cell:
        """(x [T, K], weight [N, K] from `linear_weight`) -> x @ weight.T, [T, N]."""

    def logits(self) -> nn.Cell:
        """The LM head: (x [S, H], weight [V, H] from `linear_weight`) -> float32 [S, V], unrounded on a CPU."""

    def quantized_embedding(self) -> nn.Cell:
        """(token_ids int32[T], qvalues, scales), the last two from `quantized_weight` -> dequantized rows [T, K]."""
        raise self._no_quantized_products()

    def quantized_linear(self) -> nn.Cell:
        """(x [T, K], qvalues, scales) -> [T, N]. The rows of x are quantized to 8 bits."""
        raise self._no_quantized_products()

    def quantized_logits(self) -> nn.Cell:
        """`quantized_linear` with a float32 result, for the LM head."""
        raise self._no_quantized_products()

    def route(self, attributes: Mapping[str, Any], num_experts: int, correction: ms.Parameter | None = None) -> nn.Cell:
        """(logits float32 [T, experts]) -> two tensors for `experts`. `correction` is added only to choose experts."""

    def experts(self, num_experts: int) -> nn.Cell:
        """(x [T, H], both tensors of `route`, gate_up, down, which are tuples from `expert_weights`) -> [T, H]."""

    def quantized_experts(self, num_experts: int) -> nn.Cell:
        """`experts` with Parameters from `quantized_expert_weights` and the products of `quantized_linear`."""
        raise self._no_quantized_products()

    def split(self, widths: Sequence[int]) -> nn.Cell:
        """Consecutive column ranges of x [T, sum of widths]."""

    def rotary(self, head_dim: int) -> nn.Cell:
        """(q [T, heads*D], k [T, kv_heads*D], cos [T, D], sin [T, D], context_lens int32[B]) -> rotated (q, k). Element
        i of a head is paired with element i + D/2. Rows of cos and sin have two equal halves.
        """

    def store_kv(self) -> nn.Cell:
        """Write to the cache: (k, v, key_cache, value_cache, slot_mapping) -> a tensor, which attention takes so that
        it runs later. Key and value of row t go to slot `slot_mapping[t]` = block_id * block_size + offset, int32[T].
        -1 skips the row; any other slot outside the cache raises an error.
        """

    def attention_mask(self, max_positions: int, block_size: int) -> nn.Cell:
        """(positions int32[T], block_tables int32[B, W]) -> the mask for `paged_attention`, or the positions."""

    def paged_attention(self, shape: AttentionShape, slopes: ms.Parameter | None = None) -> nn.Cell:
        """(q, key_cache, value_cache, block_tables, query_lens, context_lens, attention_mask) -> [T, num_heads*D].

        block_tables int32[B, W]; query_lens and context_lens int32[B]. Request b has `query_lens[b]` rows, the last
        ones of its context of `context_lens[b]` tokens. Decode rows, chunks and whole prompts may be mixed.
        `query_lens` None: each request has one row, and Ascend's attention takes no mask (None). `slopes`: ALiBi
        slopes, float32 [num_heads].
        """

    def largest_logits(self) -> nn.Cell | None:
        """(logits float32 [S, V]) -> int32 [S], the index of the largest (of equal ones, the lowest), and float32 [S,
        2], this index and the logit. None: steps with one token per request have no graph of their own.
        """
        return None

    def token_drawing(self, vocab_size: int, num_candidates: int) -> nn.Cell | None:
        """A Cell with the interface of `TokenDrawing`; None: the backend draws no tokens."""
        return None

    def columns(self, start: int, end: int | None = None) -> nn.Cell:
        """([N, M]) -> columns `start` to `end` - 1. Only backends with `largest_logits` have it."""
        raise AssertionError("only graphs of single tokens take columns")

    def prompt_attention(self, shape: AttentionShape) -> nn.Cell | None:
        """Attention of prompts without a cached prefix: (q, k, v, query_lens, context_lens) -> [T, num_heads*D]; None:
        not supported. A row attends to the rows of its prompt up to its own position. B is fixed when the graph is
        compiled; trailing lengths may be 0.
        """
        return None

    def program(self) -> nn.Cell | None:
        """The operator that runs a program (`network.program`): (table) -> float32 [1], a placeholder; None: it has
        none.

        `table` holds the address of every array (`kernels.library.AddressTable`): instructions and operands, the step
        inputs (`lowering.step_inputs.STEP_INPUTS`), weights, two caches per layer, states followed by `STATE_INPUTS` if
        there are any, and the result. A weight is from `linear_weight`, `packed_quantized_weight`, `block_weight`,
        `table`, `vector` or `numbers`.
        """
        return None

    def rounded(self, number: float) -> float:
        return float(rounded_to(np.float32(number), self.dtype))

    def swiglu(self) -> nn.Cell:
        """(gate_up [T, 2*I], gate first) -> silu(gate) * up, [T, I]."""

    def add(self) -> nn.Cell:
        """(a [T, H], b [T, H] or [H]) -> a + b."""

    def all_reduce(self) -> nn.Cell:
        """(x [T, N]) -> the sum of x over all ranks. Raise ModelError without tensor parallelism."""
        raise ModelError(f"the operations of {self.name} do not support tensor parallelism")

    def linear_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        """Return a matrix [N, K], copied into the layout of this backend's products. `name`: Parameter name."""
        return self._copy(array, name)

    def tied_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        """Do the same as `linear_weight`, for a weight that both `embedding` and `logits` use."""
        return self.linear_weight(array, name)

    def expert_weights(self, array: Array, num_experts: int, name: str) -> Sequence[ms.Parameter]:
        """Return the weights [num_experts * N, K] of all experts as one Parameter for each expert, or one for all."""

    def packed_rows(self, rows: RowStack, num_experts: int | None, name: str) -> ms.Parameter | None:
        """Do the same as `linear_weight` or `expert_weights` without copying the rows first; None: not supported."""
        return None

    def block_weight(self, segments: Sequence[BlockTensor], weight_only: bool, name: str | None = None) -> ms.Parameter:
        """Return a program's weight that stays in GGUF blocks. Raise ModelError if this backend has no such product.
        `segments`: consecutive rows, which are copied. All but the last have a multiple of 16 rows.
        """
        raise ModelError(f"backend {self.name} cannot run programs, which weights in GGUF blocks require")

    def packed_quantized_weight(
        self, weight: QuantizedTensor, weight_only: bool, name: str | None = None
    ) -> ms.Parameter:
        """Return a program's quantized weight. Raise ModelError if this backend has no such product. Without
        `weight_only`, the product quantizes activations to 8 bits, and 8-bit weights must have one scale per row.
        """
        raise ModelError(f"backend {self.name} cannot run programs, which this quantized weight requires")

    def quantized_weight(self, weight: QuantizedTensor, name: str) -> tuple[ms.Parameter, ms.Parameter]:
        """Return copies of the quantized values, int8 [N, K], and scales, float32 [N], for Cells. Raise ModelError
        unless the weight has 8 bits and one scale per row, and this backend has such a product.
        """
        raise self._no_quantized_products()

    def quantized_expert_weights(
        self, weight: QuantizedTensor, num_experts: int, name: str
    ) -> tuple[ms.Parameter, ms.Parameter]:
        """Do the same as `quantized_weight` for experts. Return values [experts, K, N], scales [experts, N]."""
        raise self._no_quantized_products()

    def vector(self, *arrays: Array, name: str | None = None) -> ms.Parameter:
        """Return a copy of vectors one after another, such as norm weights, in the model dtype."""
        return self._copy(np.concatenate([to_model_dtype(array, self.dtype) for array in arrays]), name)

    def numbers(self, array: Array, name: str | None = None) -> ms.Parameter:
        return float32_parameter(array, name)

    def table(self, array: Array, name: str | None = None) -> ms.Parameter:
        return self._copy(array, name)

    def kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        """Return the zeroed key and value cache of one layer, each [num_blocks, block_size, kv_heads, width]."""

    def int8_kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        """Return caches of 8-bit values, in which each head's scale follows its values. Raise ModelError if this
        backend cannot run programs, because its Cells do not read such caches.
        """
        raise ModelError(f"the operations of {self.name} do not support an int8 KV cache; use kernels: program")

    def states(self, num_slots: int, shape: StateShape, name: str) -> ms.Parameter:
        """Return the zeroed states of one operation, float32 [num_slots, *shape]. Raise ModelError if this backend
        cannot run programs, because its Cells use no states.
        """
        raise ModelError(f"{self.name} does not support layers with fixed-size states; use kernels: program")

    def copy_blocks(self, source: BlockMemory, target: BlockMemory, pairs: Int32Array) -> None:
        """Copy blocks in the order of `pairs` [n, 2] (source, target). Source and target may be the same memory."""

    def announce_ending(self, callback: Callable[[], None] | None) -> bool:
        """Call `callback` once, in another thread, when the next step is nearly done. Return False if this backend
        never does. The step waits until the callback returns. A later call of this method replaces the callback.
        """
        return False

    def _copy(self, array: Array, name: str | None) -> ms.Parameter:
        """Return a copy of the array, rounded to the model dtype."""

    def _no_quantized_products(self) -> ModelError:
        return ModelError(f"the operations of {self.name} do not support quantized weights; use kernels: program")


def model_dtype(name: str) -> Any:
    if name not in MODEL_DTYPES:
        raise ConfigError(f"`model_dtype` must be one of {', '.join(MODEL_DTYPES)}. Given: {name}")
    return getattr(ms, name)
