"""Limits of this machine, measured in the same run as the figures beside them, and the least cost of a step.

The limits are the bandwidth at which the kernels' threads read memory that is in no cache, and the operations per
second that they compute on registers. `StepCost` counts the bytes and operations that no implementation can avoid.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
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
BLOCKS: Final = "blocks"
"""Weight format of a GGUF file that is served as it is."""
MULTIPLIED_AS: Final = {"w8a8": "int8", "w4a8": "int8", BLOCKS: "int8"}
"""Weight format -> type that its products multiply; other formats multiply the model dtype."""


@dataclass(frozen=True)
class Limits:
    """Limits of the kernels' instruction set and threads, for products of elements of `dtype`."""

    isa: str
    num_threads: int
    dtype: str
    read_bytes_per_s: float
    flop_per_s: float
    attention_flop_per_s: float
    """Of attention, which multiplies the model dtype although products of quantized weights multiply int8."""

    @classmethod
    def measure(cls, dtype: str, quantization: str | None = None, *, int8_kv_cache: bool = False) -> Limits:
        """`int8_kv_cache`: attention multiplies the int8 elements of the KV cache."""
        kernels = library.load()
        isa, num_threads = kernels.llm_isa().decode(), int(kernels.llm_num_threads())
        multiplied, attended = MULTIPLIED_AS.get(quantization or "", dtype), "int8" if int8_kv_cache else dtype
        peaks = {each: arithmetic_peak(each) for each in dict.fromkeys((multiplied, attended))}
        return cls(isa, num_threads, multiplied, read_bandwidth(), peaks[multiplied], peaks[attended])

    def better_of(self, other: Limits) -> Limits:
        """Return the higher of each limit: a virtual machine can lose half of either to its neighbours for minutes."""
        rates = ("read_bytes_per_s", "flop_per_s", "attention_flop_per_s")
        return replace(self, **{each: max(getattr(self, each), getattr(other, each)) for each in rates})

    def seconds(self, num_bytes: float, flop: float, attention_flop: float = 0.0) -> float:
        """Return the least seconds to read these bytes while computing these operations of products and attention."""
        return max(
            num_bytes / self.read_bytes_per_s, flop / self.flop_per_s + attention_flop / self.attention_flop_per_s
        )

    def __str__(self) -> str:
        return (
            f"{self.isa}, {self.num_threads} threads, {self.dtype}: "
            f"read {self.read_bytes_per_s / 1e9:.1f} GB/s, multiply-add {self.flop_per_s / 1e9:,.0f} GFLOP/s"
        )


class MemoryReader:
    """Reads `READ_BYTES` of memory that is in no cache with the kernels' threads."""

    def __init__(self) -> None:
        self._memory = np.ones(READ_BYTES // 8, np.int64)

    def bandwidth(self, num_tries: int = 1) -> float:
        """Return the bytes read per second, best of `num_tries` for each of `CACHE_LEVELS`.

        CPUs differ in the cache level that allows more outstanding lines, so both levels are tried.
        """
        read, memory = library.load().llm_read_memory, self._memory
        levels = [level for _ in range(num_tries) for level in CACHE_LEVELS]
        return READ_BYTES / min(_seconds(partial(read, memory.ctypes.data, memory.nbytes, level)) for level in levels)


def read_bandwidth() -> float:
    """Return the bytes per second at which the kernels' threads read uncached memory, best of several tries."""
    return MemoryReader().bandwidth(NUM_TRIES)


def arithmetic_peak(dtype: str) -> float:
    """Return the operations per second of the kernels' threads on registers, best of several tries."""
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
    """Least cost of a step of a decoder: every weight and every context read once, every product computed."""

    spec: ModelSpec
    dtype: str
    quantization: str | None = None
    int8_kv_cache: bool = False
    counted_bytes: float | None = None
    """Bytes of the weights that a step has read, if they depend on the chosen experts or on the types of a GGUF file;
    None: those of one row."""

    def reading(self, counted_bytes: float) -> StepCost:
        """Return the cost of steps that read so many bytes of weights; unchanged for a network without experts."""
        has_experts = any(each.kind == "experts" for each in self.spec.network.operations)
        return replace(self, counted_bytes=counted_bytes) if has_experts else self

    @property
    def weight_bytes(self) -> float:
        if self.counted_bytes is not None:
            return self.counted_bytes
        return self._element_bytes * (self._layers + self._head)

    def num_bytes(self, num_context_tokens: int) -> float:
        """Return the bytes that a step reads whose rows have `num_context_tokens` in the cache in total."""
        per_token = self.spec.kv_bytes_per_token(ELEMENT_BYTES[self.dtype], int8=self.int8_kv_cache)
        return self.weight_bytes + per_token * num_context_tokens

    def flop(self, num_tokens: int, num_samples: int, num_pairs: int) -> tuple[float, float]:
        """Return the operations of a step's products and of its attention. A token that is not sampled needs only keys
        and values of the last layer.

        Args:
            num_tokens: Tokens the step computes.
            num_samples: Rows whose last token goes through the LM head.
            num_pairs: Pairs of a token and a token it attends to, in one head of one layer.
        """
        products = self._layers * num_tokens - self._spared * (num_tokens - num_samples)
        return 2.0 * (products + self._head * num_samples), 2.0 * self._attention * num_pairs

    @property
    def _element_bytes(self) -> float:
        """Bytes of a weight without scales."""
        return ELEMENT_BYTES[self.dtype] if self.quantization is None else BITS[QuantizationName(self.quantization)] / 8

    @cached_property
    def _attention(self) -> int:
        """Elements of attention scores and weighted sums for a pair of tokens, over all layers."""
        attends = [each for each in self.spec.network.operations if each.kind == "attention"]
        return sum(each.inputs["q"].width + each.outputs["y"].width for each in attends)

    @cached_property
    def _spared(self) -> int:
        """Elements of weights that a token without sampling skips."""
        plan = select_rows(self.spec.network.operations)
        behind = sum(
            math.prod(each.weights["weight"].shape)
            for each in plan.operations[:-1]
            if each.kind == "linear" and each.outputs["y"] in plan.selected
        )
        # The query of the last layer, whose product has keys and values too.
        query = next(each.inputs["q"] for each in reversed(plan.operations) if each.kind == "attention")
        return behind + query.width * self.spec.network.hidden

    @cached_property
    def _layers(self) -> int:
        """Elements of weights that a token is multiplied by, without the LM head, and those of the norms."""
        network = self.spec.network
        norms = sum(math.prod(each.weights["gamma"].shape) for each in network.operations if each.kind == "rms_norm")
        return self.spec.num_active_parameters + norms

    @property
    def _head(self) -> int:
        return self.spec.vocab_size * self.spec.network.hidden


def prompt_seconds(limits: Limits, cost: StepCost, count: int, length: int) -> float:
    """Return the least seconds for the first tokens of `count` prompts of `length` tokens in one step."""
    pairs = count * length * (length + 1) // 2
    return limits.seconds(cost.num_bytes(0), *cost.flop(count * length, count, pairs))


def decode_seconds(limits: Limits, cost: StepCost, count: int, first: int, last: int) -> float:
    """Return the least seconds for the steps in which `count` contexts grow from `first` to `last` tokens."""
    return sum(
        limits.seconds(cost.num_bytes(count * context), *cost.flop(count, count, count * context))
        for context in range(first + 1, last + 1)
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class LostCores:
    """Mean number of cores that other programs used, and that the host of a virtual machine gave to other guests."""

    programs: float
    host: float


class LostCoresMeter:
    """Counts the cores in use from its creation on."""

    def __init__(self) -> None:
        self._start, self._counts = time.perf_counter(), _cpu_seconds()

    def read(self) -> LostCores:
        elapsed = time.perf_counter() - self._start
        busy, own, stolen = (now - then for now, then in zip(_cpu_seconds(), self._counts, strict=True))
        return LostCores(max(0.0, busy - own) / elapsed, stolen / elapsed)


def _cpu_seconds() -> tuple[float, float, float]:
    """Return the CPU seconds since boot: of all programs, of this process, and stolen by the host."""
    user, nice, system, _, _, irq, softirq, stolen = (
        int(field) / _TICKS for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return user + nice + system + irq + softirq, time.process_time(), stolen


def least_seconds(run: Callable[[], object], measured_s: float) -> float:
    """Return the least seconds of a call over `measured_s` seconds of calls: disturbances only slow a call down."""
    run()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < measured_s:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
    return best
