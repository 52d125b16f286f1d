"""Sums over the devices that compute a replica together, by MindSpore's collectives (HCCL, MCCL)."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import get_group_size


class OrderedSum(nn.Cell):
    """(x [T, N]) -> the sum of x over all ranks, in their order, in float32 and rounded once

    AllReduce passes pieces around a ring: which rank an element is begun at depends on how many there are, and so on
    the batch. Here every rank gathers all parts and adds them up for itself, as `kernels/csrc/ranks.h` does. Without a
    group of processes, as when a graph is exported, the environment's RANK_SIZE says how many ranks there are.
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


class AnySum(nn.Cell):
    """(x [T, N]) -> the sum of x over all ranks, in an order that may depend on T"""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = ops.AllReduce(ops.ReduceOp.SUM)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.reduce(x)
