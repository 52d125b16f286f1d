"""What it takes to hand blocks of keys and values over: python performance/move_cost.py [--model FOLDER] [--blocks 32]

Within the step of a `prefill` replica blocks go into the transfer pool, within one of a `decode` replica out of it.
Told for each: milliseconds of this thread's own time, the middle one of so many runs, and the bytes. Beside them what a
step of that model takes with so many rows that decode, on one core; and, with [ray] installed, what it takes to bring
the blocks from one pool to another through the master, by TLS on the loopback: all ends are threads of this process,
whose own time is told. No server; needs the package.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import numpy as np
from llm_serving.config import load_config
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import BlockMove, Int32Array, Move
from llm_serving.engine.fleet.migration import Carrier
from llm_serving.engine.replica import build_engine
from llm_serving.errors import ChannelClosedError
from llm_serving.executor.cluster.block_link import BlockLink
from llm_serving.executor.cluster.listener import Listener
from llm_serving.executor.executor import LocalExecutor
from llm_serving.executor.supervisor import load_settings
from llm_serving.observability.metrics import Metrics
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from llm_serving.transport.shared_memory import blocks_a_frame, max_frame_bytes
from llm_serving.transport.tls_identity import ClusterIdentity
from llm_serving.work_agent import connect
from llm_serving.worker.kv_transfer import TransferMemory, exchange_blocks
from llm_serving.worker.loading import load_runner

NUM_ROWS: Final = 8
CONTEXT: Final = 64
NUM_STEPS: Final = 60
NUM_RUNS: Final = 21
COME_S: Final = 60.0


def moves(kind: BlockMove, count: int, *, scattered: bool) -> Int32Array:
    """Of blocks that were taken together and are neighbours, or of none that are."""
    order = np.random.default_rng(1).permutation(count).tolist() if scattered else range(count)
    return np.array([Move(kind, each, target, 1, 1, 0) for target, each in enumerate(order)], np.int32)


def milliseconds(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(NUM_RUNS):
        began = time.thread_time()
        run()
        taken.append(1000 * (time.thread_time() - began))
    return statistics.median(taken)


@contextmanager
def linked(listener: Listener, secret_file: Path, pool: TransferMemory) -> Iterator[BlockLink]:
    """The way to a thread that has a pool as a WorkAgent of another machine has its own."""
    host, port = listener.address
    with listener.expecting("pool") as arrival:
        agent = connect(f"{host}:{port}", "pool", secret_file)
        channel = arrival.wait(COME_S)
    assert channel is not None
    agent.max_frame_bytes = max_frame_bytes(pool.block_bytes)

    def serve() -> None:
        with contextlib.suppress(ChannelClosedError):
            exchange_blocks(agent, pool)

    thread = threading.Thread(target=serve)
    thread.start()
    with contextlib.closing(BlockLink(channel, pool.block_bytes, COME_S)) as link:
        yield link
    thread.join()
    agent.close()


def bring(source: TransferMemory, target: TransferMemory) -> list[tuple[float, float]]:
    """Milliseconds that it took to fill the target, by the clock and of this process's own time; of each run."""
    source.epochs[:], source.num_written[:] = 1, 1
    blocks = [(each, 1) for each in range(target.num_blocks)]
    taken: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        secret_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(secrets.token_hex(32))
        identity = ClusterIdentity(secret_file.read_text())
        listener = stack.enter_context(contextlib.closing(Listener("127.0.0.1", identity)))
        links = [stack.enter_context(linked(listener, secret_file, pool)) for pool in (source, target)]
        carrier = stack.enter_context(contextlib.closing(Carrier()))
        for _ in range(NUM_RUNS):
            came: SimpleQueue[bool] = SimpleQueue()
            began = time.perf_counter(), time.process_time()
            carrier.carry(0, blocks, links[0], links[1], came.put)
            assert came.get(timeout=COME_S), "the blocks were lost on their way"
            taken.append((1000 * (time.perf_counter() - began[0]), 1000 * (time.process_time() - began[1])))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo"))
    parser.add_argument("--blocks", type=int, default=32, help="of a request (default: 32)")
    arguments = parser.parse_args()
    count = arguments.blocks
    settings = [
        f"pa_config.num_blocks={max(count, 200)}",
        "device_config.num_threads=1",
        "serving_config.audit_every=0",
    ]
    roles = ["cluster_config.replicas=2", "cluster_config.roles=[prefill, decode]"]
    roles += [f"cluster_config.num_transfer_blocks={count}"]
    config = load_config(None, [*settings, *roles], arguments.model)
    transfer_fd = os.memfd_create("transfer")
    runner, _ = load_runner(load_settings(config, 0), lambda text: None, transfer_fd=transfer_fd)
    tensors = runner.kv_tensors
    print(f"{count} blocks of {tensors.block_bytes:,} bytes: {count * tensors.block_bytes / 1e6:.1f} MB")
    for kind in (BlockMove.EXPORT, BlockMove.IMPORT):
        for scattered in (False, True):
            asked = moves(kind, count, scattered=scattered)
            how = "scattered" if scattered else "neighbours"
            print(f"    {kind.name}, {how}: {milliseconds(partial(tensors.move_blocks, asked)):.2f} ms")
    if importlib.util.find_spec("cryptography") is not None:
        other = TransferMemory(os.memfd_create("other"), count, tensors.layers)
        assert tensors.transfer is not None
        by_clock, own = (statistics.median(each) for each in zip(*bring(tensors.transfer, other), strict=True))
        frames = -(-count // blocks_a_frame(tensors.block_bytes))
        print(
            f"    brought to another pool, {frames} frames: {by_clock:.2f} ms by the clock, {own:.2f} of this process"
        )
    alone = load_config(None, settings, arguments.model)
    assert alone.model.model_path is not None
    tokenizer = Tokenizer.load(alone.model.model_path)
    engine = build_engine(alone, tensors.num_blocks, LocalExecutor(runner), tokenizer, Metrics(), lambda pieces: None)
    params = SamplingParams(max_tokens=NUM_STEPS, temperature=0.0, ignore_eos=True)
    for index in range(NUM_ROWS):
        engine.submit(Request(str(index), list(range(5 + index, 5 + index + CONTEXT)), params))
    for _ in range(10):
        engine.step()
    taken = []
    while True:
        before, began = engine.num_steps, time.process_time()
        if not engine.step():
            break
        if engine.num_steps > before:
            taken.append(1000 * (time.process_time() - began))
    print(f"a step in which {NUM_ROWS} rows decode, the master's part included: {statistics.median(taken):.2f} ms")


if __name__ == "__main__":
    main()
