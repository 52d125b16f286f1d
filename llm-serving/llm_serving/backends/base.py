"""The interface of a backend: the operations of a decoder as Cells (MindSpore modules), and their Parameters.

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
    """Sizes of an attention operation. `window` and `cap` (see `Network.attention`) are 0 if the layer has none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    cap: float = 0.0


class Backend(Protocol):
    """One implementation of a decoder's operations, each as a Cell (a MindSpore module) or as a primitive, which is
    called like a Cell. Both are cheap to create and take weights as arguments.

    A backend that lacks an operation inherits the method of this class, which raises an error or returns None.
    Docstrings of methods that return a Cell state what the Cell computes, as (arguments) -> result.
    """

    name: str
    attention_rows: int = 0
    """If not 0, attention computes each token as its own request, and a step has a multiple of this many rows."""

    dtype: str

    activation_dtype: Any
    """MindSpore dtype of activations, of cosines and sines, and of the result of `embedding`."""

    def unsupported(self, network: Network, num_positions: int) -> str | None:
        """Return a feature of the network that this backend's Cells do not support, or None if they support all."""

    def embedding(self) -> nn.Cell:
        """Token embedding: (token_ids int32[T], table [V, H] from `table` or `tied_weight`) -> rows [T, H]."""

    def rms_norm(self, eps: float) -> nn.Cell:
        """RMS norm of rows, computed in float32 and rounded once: (x [T, H], gamma [H]) -> [T, H]."""

    def add_rms_norm(self, eps: float) -> nn.Cell:
        """(x [T, H], y [T, H], gamma [H]) -> (rms_norm of x + y, x + y). The sum is rounded before it is normalised."""

    def linear(self) -> nn.Cell:
        """(x [T, K], weight [N, K] from `linear_weight`) -> x @ weight.T, [T, N]."""

    def logits(self) -> nn.Cell:
        """(x [S, H], weight [V, H] from `linear_weight`) -> float32 logits [S, V], not rounded to `dtype` on a CPU."""

    def quantized_embedding(self) -> nn.Cell:
        """(token_ids int32[T], qvalues and scales from `quantized_weight`) -> dequantized rows [T, K]."""
        raise self._no_quantized_products()

    def quantized_linear(self) -> nn.Cell:
        """(x [T, K], qvalues, scales) -> [T, N]. The rows of x are quantized to 8 bits."""
        raise self._no_quantized_products()

    def quantized_logits(self) -> nn.Cell:
        """`quantized_linear` with a float32 result, for the LM head."""
        raise self._no_quantized_products()

    def route(self, attributes: Mapping[str, Any], num_experts: int, correction: ms.Parameter | None = None) -> nn.Cell:
        """(router logits float32 [T, experts]) -> two tensors for `experts`, which say which experts compute a row, and
        with which weights. `correction` affects the choice of experts, but not their weights.
        """

    def experts(self, num_experts: int) -> nn.Cell:
        """Return a Cell that computes the chosen experts of each token and adds their results by weight: (x [T, H],
        both tensors of `route`, gate_up and down from `expert_weights`) -> [T, H].
        """

    def quantized_experts(self, num_experts: int) -> nn.Cell:
        """The same as `experts`, with weights from `quantized_expert_weights` and activations in 8 bits."""
        raise self._no_quantized_products()

    def split(self, widths: Sequence[int]) -> nn.Cell:
        """(x [T, sum of widths]) -> consecutive column ranges of x, which have these widths."""

    def rotary(self, head_dim: int) -> nn.Cell:
        """(q [T, heads*D], k [T, kv_heads*D], cos [T, D], sin [T, D], context_lens int32[B]) -> rotated (q, k). Element
        i of a head is paired with element i + D/2. Rows of cos and sin have two equal halves. The primitive for Ascend
        requires context lengths, which have no effect.
        """

    def store_kv(self) -> nn.Cell:
        """Write to the cache: (k, v, key_cache, value_cache, slot_mapping int32[T]) -> a tensor. Attention takes this
        tensor as an argument, so that it runs after the write.

        Key and value of row t go to slot `slot_mapping[t]` = block_id * block_size + offset. -1 skips the row; any
        other slot outside the cache raises an error.
        """

    def attention_mask(self, max_positions: int, block_size: int) -> nn.Cell:
        """(positions int32[T], block_tables int32[B, W]) -> the argument `attention_mask` of `paged_attention`: a mask,
        or the positions themselves if the attention of this backend compares positions.
        """

    def paged_attention(self, shape: AttentionShape, slopes: ms.Parameter | None = None) -> nn.Cell:
        """(q, key_cache, value_cache, block_tables, query_lens, context_lens, attention_mask) -> [T, num_heads*D].

        block_tables int32[B, W]; query_lens and context_lens int32[B]. Request b has `query_lens[b]` rows, which are
        the last tokens of its context of `context_lens[b]` tokens. Decode rows, chunks and whole prompts may be mixed.
        If `query_lens` is None, each request has one row, and attention on Ascend takes None as its mask. `slopes` are
        the ALiBi slopes, float32 [num_heads].
        """

    def largest_logits(self) -> nn.Cell | None:
        """(logits float32 [S, V]) -> (index of each row's largest logit int32 [S], float32 [S, 2] with this index and
        the logit). Of equal logits, the lowest index counts. Return None if the backend compiles no separate graph for
        decode-only steps, because only that graph uses this Cell.
        """
        return None

    def token_drawing(self, vocab_size: int, num_candidates: int) -> nn.Cell | None:
        """Return a Cell that samples tokens and has the interface of `TokenDrawing`, or None if unsupported."""
        return None

    def columns(self, start: int, end: int | None = None) -> nn.Cell:
        """(x [N, M]) -> columns `start` to `end` - 1 of x. Only backends with `largest_logits` implement it."""
        raise AssertionError(
            f"backend {self.name} has no graph for steps of single tokens, and only that graph needs columns"
        )

    def prompt_attention(self, shape: AttentionShape) -> nn.Cell | None:
        """Attention of prompts without a cached prefix: (q, k, v, query_lens, context_lens) -> [T, num_heads*D]. A row
        attends to the rows of its prompt up to its own position. B is fixed when the graph is compiled, but trailing
        lengths may be 0. Return None if the backend does not support this operation.
        """
        return None

    def program(self) -> nn.Cell | None:
        """Return the operator that computes a whole network, or a part such as the LM head, in one call: (table) ->
        float32 [1], a placeholder. It interprets a program: a list of instructions, encoded as integers
        (`network.program`). Return None if the backend lacks this operator.

        `table` holds addresses (`kernels.library.AddressTable`) of the program's instructions and operands, the step
        inputs (`lowering.step_inputs.STEP_INPUTS`), weights, two caches per layer, recurrent states followed by
        `STATE_INPUTS` if there are any, and the result. Weights must come from `linear_weight`,
        `packed_quantized_weight`, `block_weight`, `table`, `vector` or `numbers`.
        """
        return None

    def rounded(self, number: float) -> float:
        return float(rounded_to(np.float32(number), self.dtype))

    def swiglu(self) -> nn.Cell:
        """(gate_up [T, 2*I], gate first) -> silu(gate) * up, [T, I]."""

    def add(self) -> nn.Cell:
        """(a [T, H], b [T, H] or [H]) -> a + b."""

    def all_reduce(self) -> nn.Cell:
        """(x [T, N]) -> the sum of x over all ranks. Raise ModelError if this backend has no tensor parallelism."""
        raise ModelError(f"the operations of {self.name} do not support tensor parallelism")

    def linear_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        """Return a matrix [N, K], copied into the layout of this backend's products. `name`: Parameter name."""
        return self._copy(array, name)

    def tied_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        """Return a matrix as `linear_weight` does, in a layout that both `embedding` and `logits` can read."""
        return self.linear_weight(array, name)

    def expert_weights(self, array: Array, num_experts: int, name: str) -> Sequence[ms.Parameter]:
        """Return the weights of all experts, `array` [num_experts * N, K]: one Parameter each, or one for all."""

    def packed_rows(self, rows: RowStack, num_experts: int | None, name: str) -> ms.Parameter | None:
        """Return the result of `linear_weight` or `expert_weights`, but read `rows` directly, without an intermediate
        copy. Return None if the backend cannot do so, for example because the rows do not have the model dtype.
        """
        return None

    def block_weight(self, segments: Sequence[BlockTensor], weight_only: bool, name: str | None = None) -> ms.Parameter:
        """Return a weight that keeps its GGUF quantization blocks. `segments`: tensors whose rows follow each other in
        the weight; all except the last must have a multiple of 16 rows. `weight_only`: multiply by bfloat16 rows
        instead of 8-bit rows. Raise ModelError if the backend has no kernel for such weights.
        """
        raise ModelError(f"weights in GGUF blocks need `kernels: program`, which backend {self.name} does not support")

    def packed_quantized_weight(
        self, weight: QuantizedTensor, weight_only: bool, name: str | None = None
    ) -> ms.Parameter:
        """Return a quantized weight for `program`. Unless `weight_only`, the product quantizes activations to 8 bits,
        and 8-bit weights must have one scale per row. Raise ModelError if this backend cannot multiply by the weight.
        """
        raise ModelError(f"this quantized weight needs `kernels: program`, which backend {self.name} does not support")

    def quantized_weight(self, weight: QuantizedTensor, name: str) -> tuple[ms.Parameter, ms.Parameter]:
        """Return copies of the quantized values, int8 [N, K], and scales, float32 [N], for Cells. Raise ModelError if
        the weight does not have 8 bits and one scale per row, or if this backend's Cells take no quantized weights.
        """
        raise self._no_quantized_products()

    def quantized_expert_weights(
        self, weight: QuantizedTensor, num_experts: int, name: str
    ) -> tuple[ms.Parameter, ms.Parameter]:
        """Do the same as `quantized_weight` for experts. Return values [experts, K, N], scales [experts, N]."""
        raise self._no_quantized_products()

    def vector(self, *arrays: Array, name: str | None = None) -> ms.Parameter:
        """Return the concatenation of vectors, such as norm weights, as a copy in the model dtype."""
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
        """Return the 8-bit KV cache of a layer. The scale of each head follows its values."""
        raise ModelError(f"the operations of {self.name} do not support an int8 KV cache; use kernels: program")

    def states(self, num_slots: int, shape: StateShape, name: str) -> ms.Parameter:
        """Return memory for `num_slots` recurrent states, initially zero: float32 [num_slots, *shape]."""
        raise ModelError(f"{self.name} does not support layers with fixed-size states; use kernels: program")

    def copy_blocks(self, source: BlockMemory, target: BlockMemory, pairs: Int32Array) -> None:
        """Copy blocks in the order of `pairs` [n, 2] (source, target). Source and target may be the same memory."""

    def announce_ending(self, callback: Callable[[], None] | None) -> bool:
        """Call `callback` once, in another thread, when the next step is nearly done. The step waits until it returns.
        A later call of this method replaces the callback. Return False if this backend cannot make such calls.
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
