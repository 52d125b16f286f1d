"""What a backend offers: the operations of a decoder as Cells, and the tensors they work on.

Shapes, used below: T packed tokens of a step (the rows of its B requests one after another, no padding), S sampled
rows, H hidden size, N output features, K input features, D head_dim, V vocabulary size, I intermediate size, W blocks
in the widest block table. First dimensions may be dynamic; nothing is compiled again when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import mindspore as ms
from mindspore import nn
from numpy.typing import NDArray

from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.step import Int32Array
from llm_serving.errors import ConfigError
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.network.builder import CacheShape, Network

Array = NDArray[Any]
"""float32, float16, or bfloat16 carried as uint16 bits."""

BlockMemory: TypeAlias = ms.Parameter | Array
"""Blocks of keys or values: a cache, or plain memory."""


@dataclass(frozen=True)
class AttentionShape:
    """
    Attributes:
        num_heads, num_kv_heads, head_dim: Of the queries and of the cache.
        scale: Of the scores.
        window: Tokens a row sees, itself included; 0 for all.
        cap: Scores s become cap * tanh(s / cap); 0: they stay.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    cap: float = 0.0


class Backend(Protocol):
    """One way to compute a decoder. Cells are cheap to make and hold no weights: weights are arguments."""

    name: str

    dtype: str
    """The model dtype, as in `MODEL_DTYPES`."""

    activation_dtype: Any
    """MindSpore dtype of every activation and of the cosines and sines, and what `embedding` returns."""

    def lacking(self, network: Network, num_positions: int) -> str | None:
        """What a network needs and the Cells of this backend do not compute; None where they compute everything.

        Args:
            network: The description.
            num_positions: Longest context that is served.
        """

    def embedding(self) -> nn.Cell:
        """(token_ids int32[T], table [V, H]) -> [T, H]. The table is from `table` or from `linear_weight`."""

    def rms_norm(self, eps: float) -> nn.Cell:
        """(x [T, H], gamma [H]) -> [T, H]; computed in float32, rounded once."""

    def add_rms_norm(self, eps: float) -> nn.Cell:
        """(x [T, H], y [T, H], gamma [H]) -> (rms_norm of x + y, x + y), the sum rounded to the model dtype first."""

    def linear(self) -> nn.Cell:
        """(x [T, K], weight [N, K] from `linear_weight`) -> [T, N] = x @ weight.T"""

    def logits(self) -> nn.Cell:
        """(x [S, H], weight [V, H] from `linear_weight`) -> float32 [S, V], not rounded to the model dtype on a CPU."""

    def quantized_embedding(self) -> nn.Cell:
        """(token_ids int32[T], codes, scales, both from `quantized_weight`) -> code * scale, [T, K]"""

    def quantized_linear(self) -> nn.Cell:
        """(x [T, K], codes, scales) -> [T, N], of rows brought to 8 bits with a scale each, as `kernels.w8a8` does"""

    def quantized_logits(self) -> nn.Cell:
        """As `quantized_linear`, in float32, as `logits`."""

    def route(self, attributes: Mapping[str, Any], num_experts: int, correction: ms.Parameter | None = None) -> nn.Cell:
        """(logits float32 [T, experts]) -> two tensors that say what `experts` wants to know of shares and choice

        Args:
            attributes: Those of the operation `route`.
            num_experts: Of the layer.
            correction: float32 [experts], added to scores for choosing alone.
        """

    def experts(self, num_experts: int) -> nn.Cell:
        """(x [T, H], both of `route`, gate_up, down) -> [T, H], as the operation `experts`

        gate_up and down are tuples of what `expert_weights` made.
        """

    def quantized_experts(self, num_experts: int) -> nn.Cell:
        """As `experts`, of what `quantized_expert_weights` made: each product as `quantized_linear`."""

    def split(self, widths: Sequence[int]) -> nn.Cell:
        """(x [T, sum of widths]) -> its columns, one range after another"""

    def rotary(self, head_dim: int) -> nn.Cell:
        """(q [T, heads*D], k [T, kv_heads*D], cos [T, D], sin [T, D], context_lens int32[B]) -> (q, k) turned

        Element i of a head turns with element i + D/2 (rotate half) by row t of cos and sin, both of two equal halves.
        """

    def store_kv(self) -> nn.Cell:
        """(k, v, key_cache, value_cache, slot_mapping) -> a tensor to depend on

        Key and value of row t go to slot `slot_mapping[t]` = block_id * block_size + offset, int32[T]; -1 skips the
        row; any other slot outside the cache raises.
        """

    def lengths(self) -> nn.Cell:
        """(int32[B]) -> the same, in the memory from which attention reads lengths"""

    def seen(self, max_positions: int, block_size: int) -> nn.Cell:
        """(positions int32[T], block_tables int32[B, W]) -> what tells attention which keys each row sees

        A row sees the keys of its request up to its own position. Computed once for all layers.

        Args:
            max_positions: Longest context of a row, in tokens.
            block_size: Tokens of a block.
        """

    def paged_attention(self, shape: AttentionShape, slopes: ms.Parameter | None = None) -> nn.Cell:
        """(q, key_cache, value_cache, block_tables, query_lens, context_lens, seen) -> [T, num_heads*D]

        block_tables int32[B, W]; query_lens and context_lens int32[B], from `lengths`. Request b owns `query_lens[b]`
        rows, the last of its context of `context_lens[b]` tokens; `seen` says how much of it each row sees. Decode
        rows, chunks and whole prompts mix freely.

        Args:
            shape: Of the attention.
            slopes: float32 [num_heads], what scores lose with each token of distance; None: nothing.
        """

    def prompt_attention(self, shape: AttentionShape) -> nn.Cell | None:
        """(q, k, v, query_lens, context_lens) -> [T, num_heads*D], for steps of which nothing was computed before

        The device's fastest way for prompts: keys and values come straight from the products of the step, and a row
        sees those of its prompt up to its own. B is fixed when the graph is compiled, with trailing lengths of 0. None
        where there is no such way.
        """

    def program(self) -> nn.Cell | None:
        """(table) -> float32 [1], no number; None where programs are not run.

        `table` has the addresses of all there is (`kernels.addressed.AddressTable`): instructions and operands, what
        belongs to the step (as `lowering.step.STEP_INPUTS`), weights, caches and the result. Weights are as
        `network.program.Program` numbers them, each from `linear_weight`, `coded_weight`, `table`, `vector` or
        `numbers`; each layer has a key and a value cache.
        """

    def rounded(self, number: float) -> float:
        """The nearest number of the model dtype."""

    def swiglu(self) -> nn.Cell:
        """(gate_up [T, 2*I], gate first) -> [T, I] = silu(gate) * up"""

    def add(self) -> nn.Cell:
        """(a [T, H], b [T, H]) -> a + b"""

    def all_reduce(self) -> nn.Cell:
        """(x [T, N]) -> the sum of x over all ranks

        Raises:
            ModelError: Networks of this backend are computed by one process.
        """

    def linear_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        """A matrix [N, K] as the products of this backend want it; its elements may be in another order.

        Args:
            array: The weight; it is copied and may be a read-only memory map.
            name: Parameter name; without it a Cell names the parameter after its attribute.
        """

    def expert_weights(self, array: Array, num_experts: int, name: str) -> Sequence[ms.Parameter]:
        """The matrices [N, K] of all experts, given as [num_experts * N, K]; each a Parameter, or one of them all."""

    def coded_weight(self, weight: QuantizedTensor, widened: bool, name: str | None = None) -> ms.Parameter:
        """As `linear_weight`, of codes; for programs alone.

        Args:
            weight: Codes and scales; they are copied.
            widened: It multiplies rows as they are; otherwise rows brought to 8 bits, where 8 bits have no groups.
            name: Parameter name.

        Raises:
            ModelError: This backend has no products of them.
        """

    def quantized_weight(self, weight: QuantizedTensor, name: str) -> tuple[ms.Parameter, ms.Parameter]:
        """Codes int8 [N, K] and scales float32 [N], copied; for Cells.

        Args:
            weight: Of 8 bits, with a scale for each row.
            name: Of both, with an ending.

        Raises:
            ModelError: It has another form, or this backend has no products of codes.
        """

    def quantized_expert_weights(
        self, weight: QuantizedTensor, num_experts: int, name: str
    ) -> tuple[ms.Parameter, ms.Parameter]:
        """Codes int8 [experts, K, N] and scales float32 [experts, N], copied; for Cells.

        Args:
            weight: [num_experts * N, K], of 8 bits, with a scale for each row.
            num_experts: Of the layer.
            name: Of both, with an ending.

        Raises:
            ModelError: It has another form, or this backend has no products of codes.
        """

    def vector(self, *arrays: Array, name: str | None = None) -> ms.Parameter:
        """Vectors (the gain of a norm), copied, as one."""

    def numbers(self, array: Array, name: str | None = None) -> ms.Parameter:
        """A vector in float32, whatever the model dtype, copied."""

    def table(self, array: Array, name: str | None = None) -> ms.Parameter:
        """A table [V, H] whose rows are looked up, copied."""

    def kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        """Key and value cache of one layer, zeroed, of shape [num_blocks, block_size, kv_heads, width].

        Block i is row i of the buffer, so blocks may be copied whole; the order inside a block is the backend's own.
        """

    def coded_kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        """As `kv_cache`, in 8 bits; for programs alone.

        A row of a head has `network.description.SCALE_BYTES` bytes beyond its codes, so that a block has its scales in
        it and is copied with them.

        Raises:
            ModelError: This backend does not attend to such caches.
        """

    def copy_blocks(self, source: BlockMemory, target: BlockMemory, pairs: Int32Array) -> None:
        """Copies whole blocks as if one after the other; the next call of a graph sees them.

        Args:
            source: A cache from `kv_cache` or `coded_kv_cache`, or blocks beside it from `parameters.host_blocks`.
            target: A cache or such blocks, of blocks alike; may be `source` itself.
            pairs: [n, 2] of source block and target block, inside `source` and `target`: nothing checks them again.
        """

    def announce_ending(self, tell: Callable[[], None] | None) -> bool:
        """Has `tell` called, once, when the next step nears its end, in place of what was given before.

        It is called in another thread while the step is computed, which goes on when it returns.

        Returns:
            False where nothing tells when a step ends; then nobody is told.
        """


def model_dtype(name: str) -> Any:
    """The MindSpore dtype of `model_dtype` in the configuration.

    Raises:
        ConfigError: The name is none of `MODEL_DTYPES`.
    """
    if name not in MODEL_DTYPES:
        raise ConfigError(f"`model_dtype` must be one of {', '.join(MODEL_DTYPES)}. Given: {name}")
    return getattr(ms, name)
