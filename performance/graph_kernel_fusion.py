"""What MindSpore's fusion of operators does on a CPU: python performance/graph_kernel_fusion.py [--calls N]

Without it, with `jit_level` O1, and with MindSpore's own switch, `enable_graph_kernel`, beside that: how many fused
kernels MindSpore made, and how long a call took. First a chain of operators whose shapes are told, then the same with a
number of rows that is left open, as every graph of this project leaves it; then a step of one row of the shipped model,
out of MindSpore's own operations and out of primitives. Each in a process and a folder of its own, where MindSpore
leaves the kernels it has fused.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CHAINS = {"chain, fixed shapes": False, "chain, open shapes": True}
NETWORKS = {
    "network, plain": ("device_config.kernels=plain",),
    "network, primitives": ("device_config.kernels=primitives", "model_config.model_dtype=float16"),
}
WAYS = ("O0", "O1", "fused")
FUSED = "akg_kernel_meta/*.so"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, metavar="N", help="calls to time (default: 200)")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one is not None:
        print(f"{_microseconds(_call_of(*arguments.one), arguments.calls):.0f}")
        return 0
    print(f"{'':22} {'way':>6} {'fused kernels':>14} {'us a call':>10}")
    for what in (*CHAINS, *NETWORKS):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, str(Path(__file__).resolve()), "--calls", str(arguments.calls)]
                run = subprocess.run(  # noqa: S603
                    [*command, "--one", what, way], cwd=folder, capture_output=True, text=True, check=False
                )
                if run.returncode != 0:
                    sys.stderr.write(run.stderr)
                    return 1
                fused = len(list(Path(folder).glob(FUSED)))
            print(f"{what:22} {way:>6} {fused:14} {run.stdout.split()[-1]:>10}", flush=True)
    return 0


def _microseconds(call: Callable[[], object], calls: int) -> float:
    """Of one call, the first few left out."""
    for _ in range(5):
        call()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls * 1e6


def _call_of(what: str, way: str) -> Callable[[], object]:
    import mindspore as ms

    if way == "fused":
        ms.set_context(enable_graph_kernel=True)
    level = "O0" if way == "O0" else "O1"
    return _chain(CHAINS[what], level) if what in CHAINS else _network(NETWORKS[what], level)


def _chain(is_open: bool, level: str) -> Callable[[], object]:
    import mindspore as ms
    import numpy as np
    from mindspore import nn, ops

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": level})

    class Chain(nn.Cell):
        def construct(self, x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
            a = x * y + x
            b = ops.exp(a) - y
            return ops.tanh(b) * a * 0.5 + b

    chain, x = Chain(), ms.Tensor(np.random.default_rng(0).random((64, 1024), np.float32))
    if is_open:
        chain.set_inputs(*(ms.Tensor(shape=[None, 1024], dtype=ms.float32),) * 2)
    return lambda: chain(x, x).asnumpy()


def _network(settings: Sequence[str], level: str) -> Callable[[], object]:
    from llm_serving.config import load_config
    from llm_serving.core.sampling_params import SamplingParams
    from llm_serving.offline import LLM

    overrides = [*settings, f"device_config.jit_level={level}", "pa_config.num_blocks=64"]
    model = LLM(load_config(None, overrides, Path("demo")))
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    return lambda: model.generate([[1]], one_token)


if __name__ == "__main__":
    raise SystemExit(main())
