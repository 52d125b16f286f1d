"""A WorkAgent without a model, in the master's process: it reads each step and samples tokens at random."""

from __future__ import annotations

import time
from collections import deque

import msgspec
import numpy as np
from llm_serving.config.schema import ServingConfig
from llm_serving.core.step import StepOutput, no_top_tokens
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.transport.codec import STEP_TYPES, encode_output, max_step_bytes, step_from_arrays
from llm_serving.transport.messages import RunStep, StepDone
from llm_serving.transport.shared_memory import SharedBuffers

NUM_BUFFERS = 2


class RandomAgent:
    """A `Channel` without a socket: messages are encoded and decoded as by the real one, and answered at once.

    Args:
        buffers: Buffers of the steps.
        low: Smallest token id that is sampled.
        high: One more than the largest token id.
        step_s: Seconds that a step sleeps.
    """

    def __init__(self, buffers: SharedBuffers, low: int, high: int, step_s: float = 0.0) -> None:
        self._buffers = buffers
        self._low, self._high = low, high
        self._step_s = step_s
        self._steps: deque[bytes] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RunStep)
        self._rng = np.random.default_rng(0)
        self.cpu_s = 0.0
        """CPU time of `receive`, which a real WorkAgent spends in its own process."""

    def send(self, message: RunStep) -> None:
        self._steps.append(self._encoder.encode(message))

    def receive(self, timeout_s: float | None = None) -> StepDone:
        del timeout_s
        began = time.thread_time()
        message = self._decoder.decode(self._steps.popleft())
        step = step_from_arrays(message.step, self._buffers.read(message.buffer, message.shapes, STEP_TYPES))
        num_samples = step.sampling.num_samples
        token_ids = self._rng.integers(self._low, self._high, num_samples).astype(np.int32)
        logprobs = np.zeros(num_samples, np.float32)
        if self._step_s:
            time.sleep(self._step_s)
        reply = encode_output(StepOutput(message.step, token_ids, logprobs, no_top_tokens(num_samples)))
        self.cpu_s += time.thread_time() - began
        return reply

    def fileno(self) -> None:
        return None


def random_executor(
    config: ServingConfig, low: int, high: int, step_s: float = 0.0
) -> tuple[RemoteExecutor, RandomAgent]:
    """Return an executor with a `RandomAgent`, with buffers for any step of the configuration."""
    model, scheduler = config.model, config.scheduler
    num_bytes = max_step_bytes(
        scheduler.max_prefill_tokens, model.decode_batch_size, model.max_generate_length, config.pa.block_size
    )
    buffers = SharedBuffers.create(NUM_BUFFERS, num_bytes)
    agent = RandomAgent(buffers, low, high, step_s)
    return RemoteExecutor(agent, buffers), agent  # type: ignore[arg-type]  # it has the methods that the executor uses
