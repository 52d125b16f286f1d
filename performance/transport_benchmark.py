"""What a step costs on its way to a WorkAgent and back: python performance/transport_benchmark.py [--delays-ms 0.2,1,5]

Steps that the shipping scheduler forms go through the shipping executor, frames and loop of a WorkAgent, whose model is
left out: it answers at once, or after `--step-ms`. Ways to it, each to a process of its own:

    memory       socket and shared memory of one machine
    TCP, TLS     the cluster's port on the loopback, arrays in the frames
    + relay      the same through a process that hands bytes on, each `--delays-ms` later, in both directions: what it
                 costs by itself shows the row of 0 ms

Told for each: bytes of frames to the WorkAgent (and those in memory) and back, without TLS's own 22 bytes for each
16 KB; microseconds from the step's arrays to the reply's, the middle one and the 99th of 100; what the middle one has
beyond that of memory; and the same of a step of `--step-ms`, with one computed while the next one travels. Needs the
package with [ray]: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from delaying_relay import relay
from llm_serving.config import load_config
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import AllowedTokens, StepInput, StepOutput, no_top_tokens
from llm_serving.engine.replica import build_engine
from llm_serving.errors import ChannelClosedError
from llm_serving.executor.cluster.listener import Listener
from llm_serving.executor.executor import LocalExecutor, RemoteExecutor
from llm_serving.observability.metrics import Metrics
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from llm_serving.transport.channel import Channel
from llm_serving.transport.codec import encode_output, step_arrays
from llm_serving.transport.messages import AgentMessage, MasterMessage, RunStep
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers
from llm_serving.transport.tls_identity import ClusterIdentity

SECRET = "0123456789abcdef" * 4
BUFFER_BYTES = 2**22
NUM_BEFORE = 50
"""Steps that are not counted."""
PROMPT_LEN = 1024
COME_S = 60.0
Buffers = SharedBuffers | InlineArrays


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    steps = {
        "1 row decodes": formed(1),
        "32 rows decode": formed(32),
        "128 rows decode": formed(128),
        "a prompt of 1,024 tokens": formed(1, prompt=True),
    }
    print("| step | way | bytes to it (in memory) | back | p50, us | p99, us | added, us | one ahead, added, us |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    ways: dict[str, Way] = {"memory": in_memory, "TCP, TLS": partial(over_tcp, delay_s=None)}
    for ms in (0.0, *arguments.delays_ms):
        ways[f"+ relay, {ms:g} ms"] = partial(over_tcp, delay_s=ms / 1e3)
    least: dict[str, tuple[float, float]] = {}
    for way, opened in ways.items():
        with opened(0.0) as link, opened(arguments.step_ms / 1e3) as slow:
            for name, step in steps.items():
                at_once = link.one_at_a_time(step, arguments.steps)
                ahead = 1e6 * slow.one_ahead(step, max(arguments.steps // 5, 20))
                middle, late = 1e6 * np.quantile(at_once, (0.5, 0.99))
                of_memory, ahead_of_memory = least.setdefault(name, (middle, ahead))
                inline, memory, back = num_bytes(step, link.buffers)
                print(
                    f"| {name} | {way} | {inline:,}{f' ({memory:,})' if memory else ''} | {back:,} | {middle:,.0f} | "
                    f"{late:,.0f} | {middle - of_memory:,.0f} | {ahead - ahead_of_memory:,.0f} |",
                    flush=True,
                )
    return 0


Way = Callable[[float], contextlib.AbstractContextManager["Link"]]
"""Opens a link to a process whose steps take so many seconds."""


# --- the steps --------------------------------------------------------------------------------------------------------


class Answers:
    """A runner without a model; it keeps the newest step."""

    num_compilations = 0

    def __init__(self, step_s: float = 0.0) -> None:
        self.steps: list[StepInput] = []
        self._step_s = step_s

    def announce_ending(self, tell: Callable[[], None] | None) -> bool:
        return False

    def execute(self, step: StepInput, await_allowed: Callable[[], AllowedTokens] | None = None) -> StepOutput:
        self.steps[:] = [step]
        if self._step_s:
            time.sleep(self._step_s)
        return answer(step)


def answer(step: StepInput) -> StepOutput:
    count = step.sampling.num_samples
    return StepOutput(step.step, np.full(count, 300, np.int32), np.zeros(count, np.float32), no_top_tokens(count))


def formed(num_rows: int, *, prompt: bool = False) -> StepInput:
    """The step in which so many requests decode behind prompts of `PROMPT_LEN` tokens, or the one of a prompt."""
    config = load_config(
        None,
        [
            f"model_config.decode_batch_size={num_rows}",
            f"model_config.max_generate_length={2 * PROMPT_LEN}",
            f"scheduler_config.max_prefill_tokens={max(PROMPT_LEN, num_rows)}",
            "serving_config.audit_every=0",
        ],
        Path("demo"),
    )
    assert config.model.model_path is not None
    runner, tokenizer = Answers(), Tokenizer.load(config.model.model_path)
    num_blocks = (num_rows + 2) * -(-2 * PROMPT_LEN // config.pa.block_size)
    engine = build_engine(config, num_blocks, LocalExecutor(runner), tokenizer, Metrics(), lambda pieces: None)
    for number in range(num_rows):
        token_ids = np.random.default_rng(number).integers(300, tokenizer.vocab_size, PROMPT_LEN).tolist()
        sampling = SamplingParams(max_tokens=PROMPT_LEN - 1, ignore_eos=True, temperature=0.7, seed=number)
        engine.submit(Request(f"request-{number}", token_ids, sampling, arrival_time=float(number)))
    wanted = PROMPT_LEN if prompt else num_rows
    while not runner.steps or runner.steps[-1].num_tokens != wanted or runner.steps[-1].num_rows != num_rows:
        assert engine.step()
    return runner.steps[-1]


def num_bytes(step: StepInput, buffers: Buffers) -> tuple[int, int, int]:
    """Of its frame, of its arrays in memory, and of the reply's frame."""
    arrays = step_arrays(step)
    written = buffers.write(0, arrays)
    frame = msgspec.msgpack.encode(RunStep(step.step, 0, written.layout, False, False, written.content))
    in_memory = 0 if written.content else sum(-(-array.nbytes // 64) * 64 for array in arrays)
    return len(frame) + 4, in_memory, len(msgspec.msgpack.encode(encode_output(answer(step)))) + 4


# --- the ways ---------------------------------------------------------------------------------------------------------


@dataclass
class Link:
    """To a process that answers steps."""

    executor: RemoteExecutor
    buffers: Buffers

    def one_at_a_time(self, step: StepInput, count: int) -> list[float]:
        """Seconds of each."""
        seconds = []
        for _ in range(NUM_BEFORE + count):
            numbered = replace(step, step=self.executor.next_step)
            began = time.perf_counter()
            self.executor.submit(numbered)
            self.executor.collect()
            seconds.append(time.perf_counter() - began)
        return seconds[NUM_BEFORE:]

    def one_ahead(self, step: StepInput, count: int) -> float:
        """Seconds of a step, the middle one, where the WorkAgent has the next one already, or it is on its way."""
        ended = []
        self.executor.submit(replace(step, step=self.executor.next_step))
        for _ in range(count):
            self.executor.submit(replace(step, step=self.executor.next_step))
            self.executor.collect()
            ended.append(time.perf_counter())
        self.executor.collect()
        return float(np.median(np.diff(ended[len(ended) // 4 :])))


@contextlib.contextmanager
def in_memory(step_s: float) -> Iterator[Link]:
    ours, theirs = socket.socketpair()
    buffers = SharedBuffers.create(2, BUFFER_BYTES)
    channel: Channel[AgentMessage] = Channel(ours, AgentMessage)  # type: ignore[arg-type]
    with _process(_answer_in_memory, theirs, buffers.fd, step_s, ours):
        theirs.close()
        yield Link(RemoteExecutor(channel, buffers, COME_S), buffers)
        channel.close()
    buffers.close()


@contextlib.contextmanager
def over_tcp(step_s: float, delay_s: float | None) -> Iterator[Link]:
    """Through a relay that delays, unless that is None."""
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="transport-benchmark-"))
        secret_file = Path(folder) / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(SECRET)
        listener = undo.enter_context(contextlib.closing(Listener("127.0.0.1", ClusterIdentity(SECRET))))
        address = listener.address
        if delay_s is not None:
            address = undo.enter_context(relay(address, delay_s))
        with listener.expecting("benchmark") as arrival:
            undo.enter_context(_process(_answer_over_tcp, f"{address[0]}:{address[1]}", secret_file, step_s))
            channel = arrival.wait(COME_S)
        assert channel is not None, "the process has not come"
        undo.callback(channel.close)
        buffers = InlineArrays(2)
        yield Link(RemoteExecutor(channel, buffers, COME_S), buffers)


# --- other processes --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Ends by itself when its connection does."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.join(COME_S)


def _answer_in_memory(theirs: socket.socket, memory_fd: int, step_s: float, ours: socket.socket) -> None:
    ours.close()
    _answer(Channel(theirs, MasterMessage), SharedBuffers(memory_fd, 2, BUFFER_BYTES), step_s)  # type: ignore[arg-type]


def _answer_over_tcp(address: str, secret_file: Path, step_s: float) -> None:
    from llm_serving.work_agent import connect

    _answer(connect(address, "benchmark", secret_file), InlineArrays(2), step_s)


def _answer(channel: Channel[MasterMessage], buffers: Buffers, step_s: float) -> None:
    from llm_serving.work_agent import answer_steps

    with contextlib.suppress(ChannelClosedError):
        answer_steps(channel, Answers(step_s), buffers)  # type: ignore[arg-type]  # it has what steps need


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--delays-ms", type=lambda text: [float(each) for each in text.split(",")], default=[0.2, 1.0, 5.0]
    )
    parser.add_argument("--steps", type=int, default=1000, help="measured of each, one at a time (default: 1000)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a step, with one ahead (default: 10)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
