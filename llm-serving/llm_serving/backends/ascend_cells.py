"""The operations of a decoder as Cells of Ascend primitives.

A CPU runs the same Cells, because the operator library implements the primitives (`cpu.py`). A graph of these Cells can
be exported to MindIR on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size
from mindspore.ops.auto_generate import gen_ops_prim

_MASK_SIZE = 128
_MASKED = -10000.0
_LAST = 2**31 - 1


class AscendEmbedding(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gather = gen_ops_prim.Gather()

    def construct(self, token_ids: ms.Tensor, table: ms.Tensor) -> ms.Tensor:
        return self.gather(table, token_ids, 0)


class AscendRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.rms_norm = gen_ops_prim.RmsNorm(eps)

    def construct(self, x: ms.Tensor, gamma: ms.Tensor) -> ms.Tensor:
        return self.rms_norm(x, gamma)[0]


class AscendAddRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.add_rms_norm = gen_ops_prim.AddRmsNorm()
        self.eps = eps

    def construct(self, x: ms.Tensor, y: ms.Tensor, gamma: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        normed, _, total = self.add_rms_norm(x, y, gamma, self.eps)
        return normed, total


class AscendLogits(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=True)
        self.cast = ops.Cast()

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        return self.cast(self.matmul(x, weight), ms.float32)


class AscendQuantizedLinear(nn.Cell):
    """A matrix product of quantized values. Its sums are integers, so the order of additions does not matter."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.quantize = gen_ops_prim.DynamicQuantExt()
        self.matmul = gen_ops_prim.QuantBatchMatmul(False, True, dtype)

    def construct(self, x: ms.Tensor, qvalues: ms.Tensor, scales: ms.Tensor) -> ms.Tensor:
        rows, row_scales = self.quantize(x, None)
        return self.matmul(rows, qvalues, scales, None, None, row_scales)


class AscendQuantizedLogits(nn.Cell):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.linear = AscendQuantizedLinear(dtype)
        self.cast = ops.Cast()

    def construct(self, x: ms.Tensor, qvalues: ms.Tensor, scales: ms.Tensor) -> ms.Tensor:
        return self.cast(self.linear(x, qvalues, scales), ms.float32)


class AscendQuantizedEmbedding(nn.Cell):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.gather, self.cast, self.mul = gen_ops_prim.Gather(), ops.Cast(), ops.Mul()
        self.reshape = ops.Reshape()
        self.dtype = dtype

    def construct(self, token_ids: ms.Tensor, qvalues: ms.Tensor, scales: ms.Tensor) -> ms.Tensor:
        rows = self.cast(self.gather(qvalues, token_ids, 0), ms.float32)
        of_rows = self.reshape(self.gather(scales, token_ids, 0), (-1, 1))
        return self.cast(self.mul(rows, of_rows), self.dtype)


class AscendCausalMask(nn.Cell):
    """Returns the attention mask [T, keys]: 0 up to a row's own position, -10,000 after it. It has a column for each
    token of the widest block table. Each step computes it: a table of all positions would grow with their square.
    """

    def __init__(self, max_positions: int, block_size: int, dtype: Any) -> None:
        super().__init__()
        num_keys = -(-max_positions // block_size) * block_size
        self.keys = ms.Tensor(np.arange(num_keys, dtype=np.int32).reshape(1, -1))
        self.block_size = block_size
        self.dtype = dtype
        self.masked = ms.Tensor(np.float32(_MASKED))
        self.slice, self.greater, self.cast, self.mul = ops.StridedSlice(), ops.Greater(), ops.Cast(), ops.Mul()
        self.reshape, self.shape = ops.Reshape(), ops.Shape()

    def construct(self, positions: ms.Tensor, block_tables: ms.Tensor) -> ms.Tensor:
        num_keys = self.shape(block_tables)[1] * self.block_size
        keys = self.slice(self.keys, (0, 0), (1, num_keys), (1, 1))
        hidden = self.greater(keys, self.reshape(positions, (-1, 1)))
        return self.cast(self.mul(self.cast(hidden, ms.float32), self.masked), self.dtype)


class AscendPagedAttention(nn.Cell):
    def __init__(self, num_heads: int, num_kv_heads: int, scale: float) -> None:
        super().__init__()
        self.paged_attention = gen_ops_prim.PagedAttention(num_heads, scale, num_kv_heads)

    def construct(
        self,
        q: ms.Tensor,
        key_cache: ms.Tensor,
        value_cache: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
        mask: ms.Tensor,
    ) -> ms.Tensor:
        return self.paged_attention(
            q, key_cache, value_cache, block_tables, context_lens, None, None, mask, query_lens, None
        )


class AscendLargestLogits(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.largest = ops.ArgMaxWithValue(axis=-1, keep_dims=True)
        self.cast, self.concat, self.reshape = ops.Cast(), ops.Concat(-1), ops.Reshape()

    def construct(self, logits: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        ids, values = self.largest(logits)
        # MaxDim of CANN returns int64.
        return self.cast(self.reshape(ids, (-1,)), ms.int32), self.concat((self.cast(ids, ms.float32), values))


class AscendColumns(nn.Cell):
    """Returns columns of a matrix by the operator aclnnSlice. For `ops.Slice`, CANN would compile an operator."""

    def __init__(self, start: int, end: int | None = None) -> None:
        super().__init__()
        self.slice, self.start, self.end = gen_ops_prim.SliceExt(), start, _LAST if end is None else end

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.slice(x, 1, self.start, self.end, 1)


class AscendPromptAttention(nn.Cell):
    def __init__(self, num_heads: int, scale: float, mask: ms.Tensor) -> None:
        super().__init__()
        self.flash = gen_ops_prim.FlashAttentionScore(num_heads, scale_value=scale, input_layout="TH", sparse_mode=0)
        self.mask = mask

    def construct(
        self, q: ms.Tensor, k: ms.Tensor, v: ms.Tensor, query_lens: ms.Tensor, context_lens: ms.Tensor
    ) -> ms.Tensor:
        lens = ops.cast(query_lens, ms.int64), ops.cast(context_lens, ms.int64)
        return self.flash(q, k, v, None, None, None, self.mask, None, lens[0], lens[1])[3]


def prompt_mask(dtype: Any) -> ms.Tensor:
    """Return the mask [128, 128] that hides later keys. FlashAttentionScore in layout TH applies it along the diagonal.
    In bfloat16, the device multiplies the mask by a large negative number. In float16, it adds the mask as it is.
    """
    above = np.triu(np.ones((_MASK_SIZE, _MASK_SIZE), np.float32), 1)
    return ms.Tensor(above if dtype == ms.bfloat16 else above * _MASKED).astype(dtype)


class AscendSwiglu(nn.Cell):
    """silu(gate) * up as three primitives: split, SiLU and multiply. MindSpore's fusion pass replaces them by the
    primitive `Swiglu` and sets its attribute `FusionType`. The device refuses a `Swiglu` without this attribute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.split, self.silu, self.mul = gen_ops_prim.SplitWithSize(), gen_ops_prim.SiLU(), ops.Mul()
        self.shape = ops.Shape()

    def construct(self, gate_up: ms.Tensor) -> ms.Tensor:
        half = self.shape(gate_up)[-1] // 2
        gate, up = self.split(gate_up, (half, half), -1)
        return self.mul(self.silu(gate), up)


class AscendAdd(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.primitive = gen_ops_prim.AddExt()

    def construct(self, a: ms.Tensor, b: ms.Tensor) -> ms.Tensor:
        return self.primitive(a, b, 1)


class AscendSplit(nn.Cell):
    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.sizes = tuple(widths)
        self.primitive = gen_ops_prim.SplitWithSize()

    def construct(self, x: ms.Tensor) -> Any:
        return self.primitive(x, self.sizes, -1)


class AscendOrderedSum(nn.Cell):
    """(x [T, N]) -> the sum of x over all ranks in rank order, computed in float32 and rounded once.

    AllReduce passes chunks around a ring, so the rank at which the sum of an element starts depends on the batch size.
    This Cell instead gathers all parts on every rank and adds them there, as `kernels/csrc/ranks.h` does. Without a
    process group, as in an export, the environment variable RANK_SIZE gives the number of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.AllGather()
        self.num_ranks = get_group_size()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        parts = self.gather(x.astype(ms.float32)).reshape(self.num_ranks, -1, x.shape[1])
        total = parts[0]
        for rank in range(1, self.num_ranks):
            total = total + parts[rank]
        return total.astype(x.dtype)


class AscendUnorderedSum(nn.Cell):
    """(x [T, N]) -> the sum of x over all ranks, in an order that may depend on T."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = ops.AllReduce(ops.ReduceOp.SUM)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.reduce(x)
