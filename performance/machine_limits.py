"""What this machine can do at most, measured in the run whose figures stand beside it, and what a step costs at least.

Two limits: how fast the kernels' threads read memory that is in no cache, and how many operations they do in the
multiply-add instruction that the products use (AMX tiles, `vdpbf16ps`, float32 FMA, or `vpdpbusd`), on registers alone.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import numpy as np
from llm_serving.core.enums import QuantizationName
from llm_serving.kernels import library
from llm_serving.models.spec import ModelSpec
from llm_serving.network.operations import ELEMENT_BYTES
from llm_serving.network.quantization import BITS
from llm_serving.network.rewriting import select_rows

READ_BYTES: Final = 1 << 30
SECONDS_A_TRY: Final = 0.05
NUM_TRIES: Final = 8
CACHE_LEVELS: Final = (1, 2)
MULTIPLIED_AS: Final = {"w8a8": "int8", "w4a8": "int8"}
"""Quantisation -> what its products multiply; others multiply numbers of the model dtype."""


@dataclass(frozen=True)
class Limits:
    """Of the kernels' instruction set and threads, for products of elements of `dtype`, perhaps int8."""

    isa: str
    num_threads: int
    dtype: str
    read_bytes_per_s: float
    flop_per_s: float

    @classmethod
    def measure(cls, dtype: str, quantization: str | None = None) -> Limits:
        dtype = MULTIPLIED_AS.get(quantization or "", dtype)
        kernels = library.load()
        isa, num_threads = kernels.llm_isa().decode(), int(kernels.llm_num_threads())
        return cls(isa, num_threads, dtype, read_bandwidth(), arithmetic_peak(dtype))

    def better_of(self, other: Limits) -> Limits:
        """The higher of each limit. A virtual machine loses half of either to its neighbours for minutes at a time."""
        read = max(self.read_bytes_per_s, other.read_bytes_per_s)
        return replace(self, read_bytes_per_s=read, flop_per_s=max(self.flop_per_s, other.flop_per_s))

    def seconds(self, num_bytes: float, flop: float) -> float:
        """The least time for reading so much and computing so much at once."""
        return max(num_bytes / self.read_bytes_per_s, flop / self.flop_per_s)

    def __str__(self) -> str:
        return (
            f"{self.isa}, {self.num_threads} threads, {self.dtype}: "
            f"read {self.read_bytes_per_s / 1e9:.1f} GB/s, multiply-add {self.flop_per_s / 1e9:,.0f} GFLOP/s"
        )


def read_bandwidth() -> float:
    """Bytes per second at which the kernels' threads read memory that is in no cache, best of several.

    CPUs differ in the level of cache for which they can wait for more lines at a time.
    """
    memory = np.ones(READ_BYTES // 8, np.int64)
    read = library.load().llm_read_memory
    levels = [level for _ in range(NUM_TRIES) for level in CACHE_LEVELS]
    return READ_BYTES / min(_seconds(partial(read, memory.ctypes.data, memory.nbytes, level)) for level in levels)


def arithmetic_peak(dtype: str) -> float:
    """Operations per second of the kernels' threads on registers, best of several."""
    multiply_add = library.load().llm_multiply_add
    multiply_add.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64]
    multiply_add.restype = ctypes.c_double
    isa, rounds, best = library.load().llm_isa(), 1 << 16, 0.0
    for _ in range(NUM_TRIES):
        start = time.perf_counter()
        flop = multiply_add(isa, dtype.encode(), rounds)
        elapsed = time.perf_counter() - start
        best = max(best, flop / elapsed)
        rounds = max(rounds, int(rounds * SECONDS_A_TRY / elapsed))
    return best


@dataclass(frozen=True)
class StepCost:
    """What a step of a decoder cannot do without: every weight read once, every context read, every product."""

    spec: ModelSpec
    dtype: str
    quantization: str | None = None
    coded_cache: bool = False
    counted_bytes: float | None = None
    """What a step has read of the weights, where that depends on the experts its rows chose; None: those of one row."""

    def reading(self, counted_bytes: float) -> StepCost:
        """The cost of steps that have read so much of the weights; the same for a network without experts."""
        has_experts = any(each.kind == "experts" for each in self.spec.network.operations)
        return replace(self, counted_bytes=counted_bytes) if has_experts else self

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights that a step reads."""
        if self.counted_bytes is not None:
            return self.counted_bytes
        return self._element_bytes * (self._layers + self._head)

    def num_bytes(self, num_context_tokens: int) -> float:
        """Bytes read by a step whose rows have `num_context_tokens` in the cache together."""
        per_token = self.spec.kv_bytes_per_token(ELEMENT_BYTES[self.dtype], coded=self.coded_cache)
        return self.weight_bytes + per_token * num_context_tokens

    def flop(self, num_tokens: int, num_samples: int, num_pairs: int) -> float:
        """Operations of a step. Of a token that does not sample the last layer needs keys and values alone.

        Args:
            num_tokens: Tokens the step computes.
            num_samples: Rows whose last token goes through the head.
            num_pairs: Pairs of a token and a token it attends to, in one head of one layer.
        """
        products = self._layers * num_tokens - self._spared * (num_tokens - num_samples)
        return 2.0 * (products + self._head * num_samples + self._attention * num_pairs)

    @property
    def _element_bytes(self) -> float:
        """Of a weight; scales aside."""
        return ELEMENT_BYTES[self.dtype] if self.quantization is None else BITS[QuantizationName(self.quantization)] / 8

    @cached_property
    def _attention(self) -> int:
        """Elements of scores and sums for a pair of tokens, over all layers."""
        attends = [each for each in self.spec.network.operations if each.kind == "attend"]
        return sum(each.inputs["q"].width + each.outputs["y"].width for each in attends)

    @cached_property
    def _spared(self) -> int:
        """Elements that a token which does not sample is not multiplied by."""
        plan = select_rows(self.spec.network.operations)
        behind = sum(
            math.prod(each.weights["weight"].shape)
            for each in plan.operations[:-1]
            if each.kind == "linear" and each.outputs["y"] in plan.selected
        )
        # The query of the last layer, whose product has keys and values too.
        query = next(each.inputs["q"] for each in reversed(plan.operations) if each.kind == "attend")
        return behind + query.width * self.spec.network.hidden

    @cached_property
    def _layers(self) -> int:
        """Elements a token is multiplied by, the head aside, and those of the norms."""
        network = self.spec.network
        norms = sum(math.prod(each.weights["gain"].shape) for each in network.operations if each.kind == "norm")
        return self.spec.num_multiplied + norms

    @property
    def _head(self) -> int:
        return self.spec.vocab_size * self.spec.network.hidden


def prompt_seconds(limits: Limits, cost: StepCost, count: int, length: int) -> float:
    """The least time for the first tokens of `count` prompts of `length` tokens, as one step."""
    pairs = count * length * (length + 1) // 2
    return limits.seconds(cost.num_bytes(0), cost.flop(count * length, count, pairs))


def decode_seconds(limits: Limits, cost: StepCost, count: int, first: int, last: int) -> float:
    """The least time for the steps in which `count` contexts grow from `first` to `last` tokens."""
    return sum(
        limits.seconds(cost.num_bytes(count * context), cost.flop(count, count, count * context))
        for context in range(first + 1, last + 1)
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
