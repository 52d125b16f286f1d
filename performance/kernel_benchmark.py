"""Speed of the CPU kernels alone: python performance/kernel_benchmark.py [--shape N,K ...] [--rows 1,32,128,512]

For each weight [N, K] and number of rows M: milliseconds, GB/s of weight read and GFLOP/s, beside two limits of
the same run: what reading memory reaches, and what all threads reach on a small weight that stays in their caches.
Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_benchmark import read_bandwidth
from llm_serving.kernels import library

SHAPES = ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632), (32000, 2048))
"""The products of a 1.1B Llama: query, key and value; output; gate and up; down; head."""
CACHED_SHAPE = (64, 1024)
CACHED_ROWS = 960
SECONDS_PER_FIGURE = 0.3
COPIES_BYTES = 1 << 28
"""Weights are cycled through copies of at least this size together, so that none is found in a cache."""


class Linear:
    """y [M, N] = x [M, K] * weight.T through the operator MindSpore calls, on packed copies of one weight."""

    def __init__(self, num_outputs: int, num_inputs: int, dtype: str, copies: int) -> None:
        self._shape = (num_outputs, num_inputs)
        self._dtype = dtype
        self._kernels = library.load()
        rng = np.random.default_rng(0)
        source = _elements(rng.standard_normal(self._shape, np.float32), dtype)
        self._weights = [np.empty_like(source) for _ in range(copies)]
        for weight in self._weights:
            self._kernels.llm_pack_weight(source.ctypes.data, weight.ctypes.data, dtype.encode(), *self._shape)
        self._turn = 0

    def close(self) -> None:
        for weight in self._weights:
            self._kernels.llm_release_weight(weight.ctypes.data)

    def call(self, rows: int) -> Callable[[], None]:
        """A function that multiplies `rows` rows once."""
        num_outputs, num_inputs = self._shape
        x = _elements(np.random.default_rng(1).standard_normal((rows, num_inputs), np.float32), self._dtype)
        y = np.empty((rows, num_outputs), x.dtype)
        no, yes = np.array(False), np.array(True)
        shapes = [(ctypes.c_int64 * 2)(*shape) for shape in (x.shape, self._shape, (), (), y.shape)]
        pointers = (ctypes.POINTER(ctypes.c_int64) * 5)(
            *(ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in shapes)
        )
        ranks = (ctypes.c_int * 5)(2, 2, 0, 0, 2)
        names = (ctypes.c_char_p * 5)(*(n.encode() for n in (self._dtype, self._dtype, "bool", "bool", self._dtype)))

        def run() -> None:
            weight = self._weights[self._turn % len(self._weights)]
            self._turn += 1
            data = (ctypes.c_void_p * 5)(*(array.ctypes.data for array in (x, weight, no, yes, y)))
            status = self._kernels.MatMul(5, data, ranks, pointers, names, None, None)
            assert status == 0, library.last_error()

        return run


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    bandwidth, peak = read_bandwidth(), cached_peak(arguments.dtype)
    isa, threads = library.load().llm_isa().decode(), library.load().llm_num_threads()
    print(
        f"{isa}, {threads} threads, {arguments.dtype}: read {bandwidth / 1e9:.1f} GB/s, cached {peak / 1e9:.0f} GFLOP/s"
    )
    print(f"{'N':>6} {'K':>6} {'M':>5} {'ms':>9} {'GB/s':>7} {'share':>6} {'GFLOP/s':>9} {'share':>6}")
    figures = []
    for num_outputs, num_inputs in arguments.shape or SHAPES:
        weight_bytes = num_outputs * num_inputs * (4 if arguments.dtype == "float32" else 2)
        linear = Linear(num_outputs, num_inputs, arguments.dtype, max(1, COPIES_BYTES // weight_bytes))
        for rows in arguments.rows:
            seconds = _seconds(linear.call(rows))
            read, computed = weight_bytes / seconds, 2 * rows * num_outputs * num_inputs / seconds
            shares = f"{read / 1e9:7.1f} {read / bandwidth:6.0%} {computed / 1e9:9.0f} {computed / peak:6.0%}"
            print(f"{num_outputs:6} {num_inputs:6} {rows:5} {1e3 * seconds:9.3f} {shares}")
            figures.append({"n": num_outputs, "k": num_inputs, "m": rows, "seconds": seconds})
        linear.close()
    if arguments.json is not None:
        limits: dict[str, Any] = {
            "isa": isa,
            "threads": threads,
            "read_bytes_per_s": bandwidth,
            "cached_flop_per_s": peak,
        }
        arguments.json.write_text(json.dumps(limits | {"figures": figures}, indent=2) + "\n")
    return 0


def cached_peak(dtype: str) -> float:
    """FLOP per second of one thread on a weight that stays in its cache, times the number of threads."""
    num_outputs, num_inputs = CACHED_SHAPE
    linear = Linear(num_outputs, num_inputs, dtype, 1)
    with library.threads_in_use(1):
        seconds = _seconds(linear.call(CACHED_ROWS))
    linear.close()
    return float(2 * CACHED_ROWS * num_outputs * num_inputs / seconds * library.load().llm_num_threads())


def _seconds(run: Callable[[], None]) -> float:
    """The least time of a call, over at least `SECONDS_PER_FIGURE`: what disturbs only makes slower."""
    run()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < SECONDS_PER_FIGURE:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
    return best


def _elements(values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=_integers, action="append", metavar="N,K", help="a weight; may be repeated")
    parser.add_argument("--rows", type=_integers, default=(1, 8, 32, 128, 512), metavar="M,M,...")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
