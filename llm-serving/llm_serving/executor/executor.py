"""Executors run the steps of an engine, on a WorkAgent in another process or in this process."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from llm_serving.core.step import AllowedTokens, DraftModelClient, DraftRequest, StepInput, StepOutput
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    LLMServingError,
    ProtocolError,
    StepMismatchError,
    WorkerDiedError,
)
from llm_serving.executor.cluster.block_link import BlockLink
from llm_serving.executor.tensor_parallel import AgentLink
from llm_serving.executor.worker_process import RestartStatus
from llm_serving.log import get_logger
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.transport.codec import STEP_TYPES, allowed_arrays, decode_output, step_arrays
from llm_serving.transport.messages import (
    AgentMessage,
    DropCache,
    LoadAdapter,
    Propose,
    Proposed,
    RunStep,
    SetAllowedTokens,
    StepDone,
    StepEnding,
    StepFailed,
)
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers, num_bytes

logger = get_logger(__name__)


class StepFailedError(LLMServingError):
    """The WorkAgent could not run one step, so the KV cache of its requests is lost. The WorkAgent keeps running."""


class RestartFailedError(LLMServingError):
    """An attempt to restart the WorkAgent failed. The next call of `restart` makes another attempt, after a delay."""


class Executor(ABC):
    """Runs steps in the order of submission. The default methods suit a WorkAgent in the master's own process."""

    max_steps_in_flight: int
    next_step: int
    restart_status: RestartStatus | None = None

    @property
    def restarts_exhausted(self) -> bool:
        """Whether more than `max_restarts` restarts followed each other without a completed step."""
        return False

    @property
    def machine(self) -> str:
        """Address of the WorkAgent's machine. It is empty if this is the master's machine."""
        return ""

    @property
    def block_link(self) -> BlockLink | None:
        return None

    @abstractmethod
    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        """Submit a step. `announce_ending`: let the WorkAgent announce the end of the step, for `await_ending`."""

    @property
    def needs_allowed_tokens(self) -> bool:
        """Whether the oldest submitted step waits for `set_allowed_tokens`."""
        return False

    def set_allowed_tokens(self, allowed: AllowedTokens) -> None:  # noqa: B027
        """Send the tokens that structured output allows in the oldest step. `collect` raises an error if this fails."""

    def await_ending(self) -> None:  # noqa: B027
        """Wait until the latest step is about to end, which is the best moment to form the next one.

        If the next step were formed earlier, it would miss requests that arrive meanwhile. If it were formed later, the
        WorkAgent would idle. Return at once unless the latest step was submitted with `announce_ending`. Raise the
        errors of `collect`.
        """

    @abstractmethod
    def collect(self) -> StepOutput:
        """Wait for the oldest step's output. Raise StepFailedError if only this step failed, else WorkerError."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return the draft tokens of each request, or no tokens if the draft model fails. No step may be in flight."""
        return [[] for _ in requests]

    def drop_cache(self) -> None:  # noqa: B027
        """Return the memory of the KV cache to the operating system, if possible. No step may be in flight."""

    def set_adapter(self, number: int, folder: str) -> None:
        """Load LoRA adapter `number` from `folder`, now and after each restart; an empty `folder` unloads it."""
        raise NotImplementedError

    def fileno(self) -> int | None:
        return None

    def restart(self, reason: str) -> None:
        """Replace a lost WorkAgent. Steps are then numbered from 0 again.

        Raise RestartFailedError if this attempt failed and the caller may try again, else WorkerDiedError.
        """
        raise WorkerDiedError(reason)

    def cancel_restarts(self) -> None:  # noqa: B027
        """Cancel a restart in progress, and prevent further starts. Thread-safe."""


class Runner(Protocol):
    def execute(self, step: StepInput) -> StepOutput: ...


class Adapters(Protocol):
    def set(self, number: int, folder: str) -> None: ...


class LocalExecutor(Executor):
    max_steps_in_flight = 1
    next_step = 0

    def __init__(
        self, runner: Runner, draft_model: DraftModelClient | None = None, adapters: Adapters | None = None
    ) -> None:
        self._runner = runner
        self._draft_model = draft_model
        self._adapters = adapters
        self._submitted: deque[StepInput] = deque()

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        self._submitted.append(step)
        self.next_step += 1

    @property
    def needs_allowed_tokens(self) -> bool:
        return bool(self._submitted) and self._submitted[0].allowed_follow

    def set_allowed_tokens(self, allowed: AllowedTokens) -> None:
        step = self._submitted[0]
        self._submitted[0] = replace(step, sampling=step.sampling.with_allowed_tokens(allowed), allowed_follow=False)

    def collect(self) -> StepOutput:
        try:
            return self._runner.execute(self._submitted.popleft())
        except WorkerDiedError:
            raise
        except Exception as error:
            raise StepFailedError(f"{type(error).__name__}: {error}") from error

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        assert self._draft_model is not None
        assert not self._submitted
        return self._draft_model.propose(requests)

    def set_adapter(self, number: int, folder: str) -> None:
        assert self._adapters is not None
        self._adapters.set(number, folder)


class _NumResults(NamedTuple):
    """Number of results of each kind in a step."""

    samples: int
    scores: int
    scored_tokens: int
    vectors: int


def _check_results(step: StepInput, output: StepOutput) -> None:
    """Raise ProtocolError if a WorkAgent's output has other results than the step requested, or impossible tokens."""
    num_samples, num_scores = len(step.sampling.temperature), len(step.scoring.num_logprobs)
    scores = output.scores
    num_vectors = len(step.result_tokens) - num_samples - num_scores
    requested = _NumResults(num_samples, num_scores, len(step.scoring.token_ids), num_vectors)
    counts = len(output.token_ids), scores.top.num_results, len(scores.logprobs), len(output.vectors)
    if counts != requested:
        raise ProtocolError(
            f"the reply to step {output.step} has other results than requested. "
            f"Requested: {requested._asdict()}. Received: {_NumResults(*counts)._asdict()}"
        )
    token_ids = output.token_ids.tolist()
    for index in output.row_errors:
        if 0 <= index < num_samples and token_ids[index] == -1:
            token_ids[index] = 0
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < MAX_VOCAB_SIZE:
        raise ProtocolError(
            f"the reply to step {output.step} has token ids outside 0 to {MAX_VOCAB_SIZE - 1} or -1 without an error"
        )


class _InFlight(NamedTuple):
    step: StepInput
    message: RunStep


class RemoteExecutor(Executor):
    """Sends each step to a WorkAgent as a small frame, with its arrays in a shared buffer or in the frame.

    There are as many buffers as steps in flight, used in turn. So a buffer is overwritten only after the reply to the
    step that used it. If the WorkAgent sends no reply within `step_timeout_s`, it counts as lost.
    """

    num_restarts = 0
    """Number of consecutive restarts of the WorkAgent without a completed step."""

    def __init__(
        self,
        channel: AgentLink,
        buffers: SharedBuffers | InlineArrays,
        step_timeout_s: float | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._channel = channel
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._buffers = buffers
        self._in_flight: deque[_InFlight] = deque()
        self._replies: deque[AgentMessage] = deque()
        self._ending = -1
        self._waited_s = 0.0
        self._allowed = -1
        self.max_steps_in_flight = self._num_buffers = buffers.num_buffers
        self.next_step = 0
        self.num_compilations = 0

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        buffer = step.step % self._num_buffers
        self._check_unused(buffer)
        written = self._buffers.write(buffer, step_arrays(step))
        message = RunStep(step.step, buffer, written.shapes, announce_ending, step.allowed_follow, written.content)
        self._send(message)
        self._in_flight.append(_InFlight(step, message))
        self.next_step += 1

    @property
    def needs_allowed_tokens(self) -> bool:
        if not self._in_flight:
            return False
        oldest = self._in_flight[0].step
        return oldest.allowed_follow and oldest.step != self._allowed

    def set_allowed_tokens(self, allowed: AllowedTokens) -> None:
        oldest = self._in_flight[0].message
        self._allowed = oldest.step
        num_before = num_bytes(oldest.shapes, STEP_TYPES)
        written = self._buffers.write(oldest.buffer, allowed_arrays(oldest.step, allowed), behind=num_before)
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(SetAllowedTokens(oldest.step, written.shapes, written.content))

    def await_ending(self) -> None:
        while self._in_flight and (newest := self._in_flight[-1].message).announce_ending:
            if self._ending == newest.step or len(self._replies) == len(self._in_flight):
                return
            self._receive()

    def collect(self) -> StepOutput:
        while not self._replies:
            self._receive()
        reply = self._replies.popleft()
        step = self._in_flight.popleft().step if self._in_flight else None
        if step is None or not isinstance(reply, StepDone | StepFailed) or reply.step != step.step:
            raise _unexpected("nothing" if step is None else f"the reply to step {step.step}", reply)
        if isinstance(reply, StepFailed):
            raise StepFailedError(reply.error)
        self.num_compilations = reply.num_compilations
        try:
            output = decode_output(reply)
            _check_results(step, output)
        except ProtocolError as error:
            raise WorkerDiedError(str(error)) from error
        self.num_restarts = 0
        return output

    def set_adapter(self, number: int, folder: str) -> None:
        with contextlib.suppress(ChannelClosedError):  # a restarted WorkAgent gets it again
            self._channel.send(LoadAdapter(number, folder))

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        assert not self._in_flight
        self._send(Propose(list(requests)))
        while not self._replies:
            self._receive()
        reply = self._replies.popleft()
        if not isinstance(reply, Proposed):
            raise _unexpected("draft tokens", reply)
        if reply.error:
            logger.warning("the draft model failed: %s", reply.error)
            return [[] for _ in requests]
        if len(reply.token_ids) != len(requests):
            raise WorkerDiedError(
                f"the WorkAgent sent draft tokens for {len(reply.token_ids)} requests, expected {len(requests)}"
            )
        for request, token_ids in zip(requests, reply.token_ids, strict=True):
            if len(token_ids) > request.num_draft_tokens:
                raise WorkerDiedError(
                    f"the WorkAgent sent {len(token_ids)} draft tokens, expected at most {request.num_draft_tokens}"
                )
        return reply.token_ids

    def drop_cache(self) -> None:
        with contextlib.suppress(ChannelClosedError):  # the next step fails, and the engine restarts the WorkAgent
            self._channel.send(DropCache())

    def fileno(self) -> int | None:
        return self._channel.fileno()

    def _check_unused(self, buffer: int) -> None:
        for _, each in self._in_flight:
            assert each.buffer != buffer, f"buffer {buffer} is still used by step {each.step}"

    def _send(self, message: RunStep | Propose) -> None:
        try:
            self._channel.send(message)
        except ChannelClosedError as error:
            raise WorkerDiedError(str(error)) from error

    def _receive(self) -> None:
        began = self._clock()
        timeout_s = self._step_timeout_s
        try:
            # A message that has already arrived is read even if no time is left.
            message = self._channel.receive(None if timeout_s is None else max(timeout_s - self._waited_s, 0.001))
        except DeadlineExceededError as error:
            raise WorkerDiedError(f"the WorkAgent sent no reply within {timeout_s:g} s") from error
        except (ChannelClosedError, ProtocolError) as error:
            raise WorkerDiedError(str(error)) from error
        if isinstance(message, StepEnding):
            if not any(each.step == message.step and each.announce_ending for _, each in self._in_flight):
                raise StepMismatchError(
                    f"the WorkAgent announced the end of step {message.step}, which the master did not request"
                )
            self._ending = message.step
            self._waited_s += self._clock() - began
            return
        self._replies.append(message)
        self._waited_s = 0.0


def _unexpected(expected: str, reply: AgentMessage) -> StepMismatchError:
    return StepMismatchError(f"the WorkAgent sent an unexpected message: expected {expected}, got {str(reply)[:100]}")
