"""Speed of the CPU operators alone, beside the limits of the machine.

    python performance/run.py kernels [--cases products,attention,others]

For each operator and number of rows M: microseconds, GB/s of the bytes it must read and write, GFLOP/s, and the share
of its limit. The limit is the longer of two times: moving those bytes at the measured memory bandwidth, and computing
those operations at the measured peak of the instruction that the products use. A share above 100 % means that the data
was still in a cache, as it is in a step.

A `Case` calls one operator as MindSpore does, on data like that of a step. Arrays that a step finds in memory rather
than in a cache (weights, keys and values, the embedding table) are cycled through copies that no cache holds together.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness.machine_limits import Limits, least_seconds
from llm_serving.backends.parameters import zeroed_array, zeroed_bytes
from llm_serving.core.enums import QuantizationName
from llm_serving.kernels import library
from llm_serving.network.caches import INT8_SCALE_BYTES
from llm_serving.network.operations import ELEMENT_BYTES
from llm_serving.network.quantization import BITS, WEIGHT_ONLY
from llm_serving.network.weights import RowStack

SECONDS_PER_FIGURE = 0.3
CASES = ("products", "attention", "others")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    limits = Limits.measure(arguments.dtype, arguments.quantization)
    print(limits)
    print(f"{'operator':17} {'':22} {'M':>5} {'us':>10} {'GB/s':>7} {'GFLOP/s':>9} {'of its limit':>13}")
    figures = []
    for case in _cases(arguments):
        seconds = least_seconds(case.run, SECONDS_PER_FIGURE)
        share = limits.seconds(case.num_bytes, case.flop) / seconds
        read, computed = case.num_bytes / seconds / 1e9, case.flop / seconds / 1e9
        numbers = f"{1e6 * seconds:10,.1f} {read:7.1f} {computed:9,.0f} {share:13.0%}"
        print(f"{case.operator:17} {case.detail:22} {case.num_rows:5} {numbers}", flush=True)
        figure = {"operator": case.operator, "detail": case.detail, "rows": case.num_rows, "seconds": seconds}
        figures.append(figure | {"bytes": case.num_bytes, "flop": case.flop, "share": share})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"limits": asdict(limits), "figures": figures}, indent=2) + "\n")
    return 0


def _cases(arguments: argparse.Namespace) -> Iterable[Case]:
    rows, dtype = arguments.rows, arguments.dtype
    shape = replace(Shape(), head_dim=arguments.head_dim, num_heads=Shape().q // arguments.head_dim)
    chosen = {
        "products": lambda: products(
            arguments.shape or shape.products, rows, dtype, arguments.quantization, arguments.group_size
        ),
        "attention": lambda: attention(shape, dtype, coded=arguments.kv_cache_dtype == "int8"),
        "others": lambda: others(shape, rows, dtype),
    }
    return itertools.chain.from_iterable(chosen[name]() for name in arguments.cases)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=_names, default=CASES, metavar=",".join(CASES))
    parser.add_argument("--shape", type=_integers, action="append", metavar="N,K", help="a weight; may be repeated")
    parser.add_argument("--rows", type=_integers, default=(1, 8, 32, 128, 512), metavar="M,M,...")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quantization", choices=tuple(QuantizationName), help="how the weights of products are kept")
    parser.add_argument("--group-size", type=int, default=128, metavar="32|64|128", help="of weights of 4 bits")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"), help="of the cases of attention")
    parser.add_argument("--head-dim", type=int, default=Shape().head_dim, help="by default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(CASES)}. Given: {', '.join(unknown)}")
    return names


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


UNCACHED_BYTES: Final = 1 << 28
BLOCK_SIZE: Final = 16

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Shape:
    """Shape of the decoder whose operators are measured; TinyLlama 1.1B by default."""

    hidden: int = 2048
    intermediate: int = 5632
    num_heads: int = 32
    num_kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 32000

    @property
    def q(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Weights [N, K]: query, key and value; output; gate and up; down; head."""
        hidden, inner = self.hidden, self.intermediate
        return (
            (self.q + 2 * self.kv, hidden),
            (hidden, self.q),
            (2 * inner, hidden),
            (hidden, inner),
            (self.vocab, hidden),
        )


@dataclass(frozen=True)
class Case:
    operator: str
    detail: str
    num_rows: int
    num_bytes: float
    flop: float
    run: Callable[[], None]


def products(
    weights: Sequence[tuple[int, int]],
    all_rows: Sequence[int],
    dtype: str,
    quantization: str | None = None,
    group_size: int = 128,
) -> Iterator[Case]:
    """y [M, N] = x [M, K] * weight.T on packed weights."""
    kernels, size = library.load(), ELEMENT_BYTES[dtype]
    for n, k in weights:
        if quantization is None:
            copies = _packed_weights(n, k, dtype)
        else:
            copies = _packed_qvalues(n, k, dtype, quantization, group_size)
        for rows in all_rows:
            x, y = _random((rows, k), dtype), _random((rows, n), dtype)
            run = _cycle([_operator("MatMul", x, copy, np.False_, np.True_, y) for copy in copies])
            num_bytes = copies[0].nbytes + size * rows * (n + k)
            yield Case("MatMul", f"{n} x {k}", rows, num_bytes, 2.0 * rows * n * k, run)
        for copy in copies:
            kernels.llm_release_weight(copy.ctypes.data)


def _packed_weights(n: int, k: int, dtype: str) -> list[Array]:
    source = _random((n, k), dtype)
    copies = [zeroed_array((n, k), dtype) for _ in range(_num_copies(source.nbytes))]
    rows, _ = RowStack([source]).addresses()
    for copy in copies:
        library.load().llm_pack_weight(rows.ctypes.data, copy.ctypes.data, dtype.encode(), n, k)
    return copies


def _packed_qvalues(n: int, k: int, dtype: str, quantization: str, group_size: int) -> list[Array]:
    kernels, name = library.load(), QuantizationName(quantization)
    widened, bits = name in WEIGHT_ONLY, BITS[name]
    rng, group = np.random.default_rng(1), group_size if bits == 4 else k
    qvalues = rng.integers(0, 16, (n, k), np.uint8) if bits == 4 else rng.integers(-127, 128, (n, k), np.int8)
    scales = np.full((n, k // group), 0.01, np.float32)
    num_bytes, shown = kernels.llm_packed_qvalues_bytes(widened, bits, n, k), k * bits // 8
    memories = [zeroed_bytes(num_bytes) for _ in range(_num_copies(num_bytes))]
    for memory in memories:
        arrays = qvalues.ctypes.data, scales.ctypes.data, None, group, True, memory.ctypes.data
        kernels.llm_pack_qvalues(widened, bits, *arrays, dtype.encode(), n, k, shown)
    return [memory[: n * shown].view(np.int8).reshape(n, shown) for memory in memories]


def attention(shape: Shape, dtype: str, *, coded: bool = False) -> Iterator[Case]:
    """Yield attention of decode rows, prompt chunks and whole prompts over scattered blocks of the cache."""
    for batch, query_len, context in (
        (1, 1, 1024),
        (32, 1, 256),
        (128, 1, 256),
        (1, 128, 1152),
        (8, 128, 128),
        (1, 1024, 1024),
    ):
        yield _attention_case(shape, dtype, batch, query_len, context, coded=coded)


def others(shape: Shape, all_rows: Sequence[int], dtype: str) -> Iterator[Case]:
    """Yield the operators between the products; as in a step, their arrays are usually in a cache."""
    size = ELEMENT_BYTES[dtype]
    hidden, inner = shape.hidden, shape.intermediate
    table = _random((shape.vocab, hidden), dtype)
    cache_shape = (2 * max(all_rows) // BLOCK_SIZE + 1, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    keys, values = _random(cache_shape, dtype), _random(cache_shape, dtype)
    norm_weight, eps = _random((hidden,), dtype), np.float32(1e-5)
    rng = np.random.default_rng(3)
    for rows in all_rows:
        x, y, z = (_random((rows, hidden), dtype) for _ in range(3))
        rstd = np.empty(rows, np.float32)
        width = size * rows * hidden
        yield Case(
            "RmsNorm", f"{hidden}", rows, 2 * width, 4.0 * x.size, _operator("RmsNorm", x, norm_weight, eps, y, rstd)
        )
        run = _operator("AddRmsNorm", x, y, norm_weight, eps, y, rstd, z)
        yield Case("AddRmsNorm", f"{hidden}", rows, 4 * width, 5.0 * x.size, run)

        gate_up, product = _random((rows, 2 * inner), dtype), _random((rows, inner), dtype)
        run = _operator("Swiglu", gate_up, np.int64(-1), product)
        yield Case("Swiglu", f"{inner}", rows, 3 * size * rows * inner, 12.0 * product.size, run)

        q, k, v = _random((rows, shape.q), dtype), _random((rows, shape.kv), dtype), _random((rows, shape.kv), dtype)
        cos, sin = _random((rows, shape.head_dim), dtype), _random((rows, shape.head_dim), dtype)
        operator = "ApplyRotaryPosEmb"
        one, half = np.ones(1, np.int32), np.int64(2)
        run = _operator(operator, q, k, cos, sin, one, half, np.empty_like(q), np.empty_like(k))
        num_bytes = 2 * size * (q.size + k.size) + size * 2 * cos.size
        yield Case(operator, f"{shape.q} + {shape.kv}", rows, num_bytes, 3.0 * (q.size + k.size), run)
        slots = rng.permutation(cache_shape[0] * BLOCK_SIZE)[:rows].astype(np.int32)
        run = _operator("ReshapeAndCache", k, v, keys, values, slots, np.empty_like(k))
        yield Case("ReshapeAndCache", f"2 x {shape.kv}, scattered", rows, 4 * size * k.size, 0.0, run)

        ids = [rng.integers(0, shape.vocab, rows).astype(np.int32) for _ in range(64)]
        zero = np.int64(0)
        run = _cycle([_operator("Gather", table, each, zero, zero, x) for each in ids])
        yield Case("Gather", f"of {shape.vocab} x {hidden}", rows, 2 * width, 0.0, run)


def _attention_case(shape: Shape, dtype: str, batch: int, query_len: int, context: int, *, coded: bool) -> Case:
    blocks = -(-context // BLOCK_SIZE)
    head_bytes = shape.head_dim + INT8_SCALE_BYTES if coded else shape.head_dim * ELEMENT_BYTES[dtype]
    num_bytes = 2 * batch * context * shape.num_kv_heads * head_bytes
    layers = max(1, UNCACHED_BYTES // num_bytes)
    cache_shape = (batch * blocks * layers, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    keys, values = (_int8_cache(cache_shape) if coded else _random(cache_shape, dtype) for _ in range(2))
    q = _random((batch * query_len, shape.q), dtype)
    y, contexts = np.empty_like(q), np.full(batch, context, np.int32)
    queries, scale = np.full(batch, query_len, np.int32), np.float32(shape.head_dim**-0.5)
    tables = np.random.default_rng(2).permutation(cache_shape[0]).astype(np.int32).reshape(layers, batch, blocks)
    heads, kv_heads, mode = np.int64(shape.num_heads), np.int64(shape.num_kv_heads), np.int64(0)
    trapezoidal = np.int64(1)  # causal without a mask

    def operator(table: Array) -> Callable[[], None]:
        return _operator(
            *("PagedAttention", q, keys, values, table, contexts, None, None, None, queries, None),
            *(heads, scale, kv_heads, mode, trapezoidal, mode, y),
        )

    run = _cycle([operator(table) for table in tables])
    pairs = batch * sum(range(context - query_len + 1, context + 1))
    kind = "decode" if query_len == 1 else "prompt" if query_len == context else "chunk"
    detail = f"{kind} {batch} x {query_len} in {context}"
    return Case("PagedAttention", detail, batch * query_len, num_bytes, 4.0 * pairs * shape.q, run)


def _operator(name: str, *parameters: Any) -> Callable[[], None]:
    """Return a call of an operator that keeps its arrays alive; uint16 is bfloat16, None an absent input."""
    arrays = [None if parameter is None else np.asarray(parameter) for parameter in parameters]
    count = len(arrays)
    integers = ctypes.POINTER(ctypes.c_int64)
    shapes = [(ctypes.c_int64 * 8)(*(() if array is None else array.shape)) for array in arrays]
    data = (ctypes.c_void_p * count)(*(None if array is None else array.ctypes.data for array in arrays))
    ranks = (ctypes.c_int * count)(*(0 if array is None else array.ndim for array in arrays))
    pointers = (integers * count)(*(ctypes.cast(each, integers) for each in shapes))
    dtypes = (ctypes.c_char_p * count)(*(_dtype_name(array).encode() for array in arrays))
    function = getattr(library.load(), name)

    def run() -> None:
        status = function(count, data, ranks, pointers, dtypes, None, None)
        assert status == 0, (library.last_error(), arrays)

    return run


def _cycle(runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Return a function that calls the next of these functions each time."""
    calls = itertools.cycle(runs)
    return lambda: next(calls)()


def _dtype_name(array: Array | None) -> str:
    if array is None:
        return "none"
    return "bfloat16" if array.dtype == np.uint16 else str(array.dtype)


def _random(shape: tuple[int, ...], dtype: str) -> Array:
    """Return normal numbers in memory aligned like weights and caches, because a misaligned cache line costs twice."""
    array: Array = zeroed_array(shape, dtype)
    values = np.random.default_rng(1).standard_normal(min(array.size, 1 << 20), np.float32)
    if dtype == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    array.ravel()[:] = np.resize(values, array.size)
    return array


def _int8_cache(shape: tuple[int, int, int, int]) -> Array:
    """Return blocks of an int8 KV cache: quantized values of a group, followed by their scales."""
    num_blocks, block_size, heads, head_dim = shape
    array: Array = zeroed_bytes(math.prod(shape) + math.prod(shape[:3]) * INT8_SCALE_BYTES)
    groups = array.reshape(num_blocks, heads, block_size * (head_dim + INT8_SCALE_BYTES))
    random = np.random.default_rng(1).integers(-127, 128, 1 << 20, np.int8).view(np.uint8)
    groups[...] = np.resize(random, groups.shape)
    groups[..., block_size * head_dim :] = np.full(block_size, 0.02, np.float32).view(np.uint8)
    return array.view(np.int8).reshape(num_blocks, block_size, heads, head_dim + INT8_SCALE_BYTES)


def _num_copies(num_bytes: int) -> int:
    return max(1, UNCACHED_BYTES // num_bytes)
