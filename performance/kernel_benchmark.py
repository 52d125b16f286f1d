"""Speed of the CPU kernels alone: python performance/kernel_benchmark.py [--cases products,attention,others]

For each operator and number of rows M: microseconds, GB/s of what it must read and write, GFLOP/s, and the share of its
limit, which is the longer of two times measured in the same run: moving those bytes at the speed of reading memory, and
doing those operations at the peak of the instruction that the products use. More than 100 % means that the data was
still in a cache, as it is in a step. Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kernel_cases import Case, Shape, attention, others, products
from llm_serving.core.enums import QuantizationName
from machine_limits import Limits
from timing import least_seconds

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
        "products": lambda: products(arguments.shape or shape.products, rows, dtype, arguments.quantization),
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


if __name__ == "__main__":
    sys.exit(main())
