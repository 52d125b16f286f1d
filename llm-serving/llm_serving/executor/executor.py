"""Where steps go: a WorkAgent behind a socket, or a runner in this process."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from llm_serving.core.step import AllowedTokens, Continuation, DraftModelClient, StepInput, StepOutput
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
from llm_serving.executor.restart_status import Away
from llm_serving.executor.worker_process import AgentLink
from llm_serving.log import get_logger
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.transport.codec import allowed_arrays, decode_output, step_arrays
from llm_serving.transport.messages import (
    AgentMessage,
    Allow,
    Propose,
    Proposed,
    RunStep,
    StepDone,
    StepEnding,
    StepFailed,
)
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers

logger = get_logger(__name__)


class StepFailedError(LLMServingError):
    """The WorkAgent could not run one step; it lives on, the cache of the step's requests is lost."""


class RestartFailedError(LLMServingError):
    """A WorkAgent could not be replaced this time; whoever asks again gets another attempt, after a pause."""


class Executor(Protocol):
    """Runs steps strictly in the order they are submitted."""

    @property
    def machine(self) -> str:
        """Address of the WorkAgent's machine; empty: the master's own."""

    @property
    def block_link(self) -> BlockLink | None:
        """Transfers KV blocks from and to the WorkAgent; None: it shares memory with the others."""

    @property
    def away(self) -> Away | None:
        """What is known while the WorkAgent is being started again; None otherwise."""

    @property
    def used_up(self) -> bool:
        """Whether the WorkAgent was started again more often in a row, without a step in between, than is allowed."""

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps may be submitted before one is collected."""

    @property
    def next_step(self) -> int:
        """The number that the next step must have."""

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        """Hands a step over; `announce_ending`: `await_ending` will wait for its end to be near."""

    @property
    def awaits_allowed(self) -> bool:
        """Whether `allow` is to be called before the oldest submitted step can be collected."""

    def allow(self, allowed: AllowedTokens) -> None:
        """Tells which tokens the oldest submitted step may choose; that its WorkAgent is gone, `collect` tells."""

    def await_ending(self) -> None:
        """Waits until the newest submitted step nears its end: the one after it is best formed then.

        Earlier and it lacks whoever comes meanwhile; later and the WorkAgent waits for it. Returns at once when no step
        is in flight, when the newest is not announced and where nothing tells.

        Raises:
            WorkerError: As for `collect`.
        """

    def collect(self) -> StepOutput:
        """Waits for the oldest submitted step.

        Raises:
            StepFailedError: That step failed.
            WorkerError: The WorkAgent is gone or answers nonsense; nothing further will come.
        """

    def propose(self, continuations: Sequence[Continuation]) -> list[list[int]]:
        """Has a draft model go on with texts, while no step is submitted.

        Returns:
            For each what may follow; nothing where that fails.

        Raises:
            WorkerError: As for `collect`.
        """

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when an idle WorkAgent dies; None where that cannot happen."""

    def restart(self, reason: str) -> None:
        """Replaces a WorkAgent that is gone; what it had and what was submitted is lost, steps count from 0 again.

        Raises:
            RestartFailedError: Not this time.
            WorkerDiedError: Not any more.
        """

    def give_up(self) -> None:
        """No WorkAgent is started from now on, a restart under way is broken off. May be called from any thread."""


class Runner(Protocol):
    def execute(self, step: StepInput) -> StepOutput: ...


class Unsupervised:
    """The part of an executor that starts no WorkAgent again: one that dies is gone for good."""

    away: Away | None = None
    used_up = False
    machine = ""
    block_link: BlockLink | None = None

    def restart(self, reason: str) -> None:
        raise WorkerDiedError(reason)

    def give_up(self) -> None:
        pass


class LocalExecutor(Unsupervised):
    """Runs each step in this process, when it is collected."""

    max_steps_in_flight = 1

    def __init__(self, runner: Runner, draft_model: DraftModelClient | None = None) -> None:
        self.next_step = 0
        self._runner = runner
        self._draft_model = draft_model
        self._submitted: deque[StepInput] = deque()

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        self._submitted.append(step)
        self.next_step += 1

    @property
    def awaits_allowed(self) -> bool:
        return bool(self._submitted) and self._submitted[0].allowed_follow

    def allow(self, allowed: AllowedTokens) -> None:
        step = self._submitted[0]
        self._submitted[0] = replace(step, sampling=step.sampling.with_allowed_tokens(allowed), allowed_follow=False)

    def await_ending(self) -> None:
        pass

    def collect(self) -> StepOutput:
        try:
            return self._runner.execute(self._submitted.popleft())
        except WorkerDiedError:
            raise
        except Exception as error:
            raise StepFailedError(f"{type(error).__name__}: {error}") from error

    def propose(self, continuations: Sequence[Continuation]) -> list[list[int]]:
        assert self._draft_model is not None
        assert not self._submitted
        return self._draft_model.propose(continuations)

    def fileno(self) -> int | None:
        return None


class _Asked(NamedTuple):
    """How many results of each kind a step is to give."""

    num_samples: int
    num_scores: int
    num_named: int
    """Tokens whose log-probability is asked for."""
    num_vectors: int

    @classmethod
    def by(cls, step: StepInput) -> _Asked:
        scoring = step.scoring
        return cls(step.sampling.num_samples, scoring.num_results, len(scoring.token_ids), step.num_vectors)

    def check(self, output: StepOutput) -> None:
        """Raises ProtocolError where the output has others, or tokens that no model has."""
        scores = output.scores
        given = _Asked(len(output.token_ids), scores.top.num_results, len(scores.logprobs), len(output.vectors))
        if given != self:
            raise ProtocolError(f"the reply to step {output.step} has results of another step: {given} for {self}")
        least = -1 if output.row_errors else 0
        if self.num_samples and not least <= output.token_ids.min() <= output.token_ids.max() < MAX_VOCAB_SIZE:
            raise ProtocolError(f"the reply to step {output.step} has tokens that no model has")


class RemoteExecutor(Unsupervised):
    """Sends steps to a WorkAgent: a small frame on the socket, the arrays in a shared buffer, or in the frame.

    Each buffer belongs to the step written last, until that step's reply has come: with as many buffers as steps in
    flight none is ever rewritten while it is read.
    """

    def __init__(
        self,
        channel: AgentLink,
        buffers: SharedBuffers | InlineArrays,
        step_timeout_s: float | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """A WorkAgent that takes longer than `step_timeout_s` for a step counts as dead."""
        self._channel = channel
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._buffers = buffers
        self._in_flight: deque[RunStep] = deque()
        self._asked: deque[_Asked] = deque()
        """Of the same steps."""
        self._replies: deque[AgentMessage] = deque()
        """Those that came while the end of a step was waited for."""
        self._ending = -1
        """The newest step that nears its end."""
        self._waited_s = 0.0
        """Seconds that the oldest step in flight was waited for."""
        self._allowed = -1
        """The newest step that was told what it may choose."""
        self.max_steps_in_flight = buffers.num_buffers
        self.next_step = 0
        self.num_compilations = 0
        """Graphs the WorkAgent had compiled by its latest step."""

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        buffer = step.step % self._buffers.num_buffers
        owners = _owners_of(buffer, self._in_flight)
        assert not owners, f"buffer {buffer} still belongs to step {owners}"
        written = self._buffers.write(buffer, step_arrays(step))
        message = RunStep(step.step, buffer, written.layout, announce_ending, step.allowed_follow, written.content)
        try:
            self._channel.send(message)
        except ChannelClosedError as error:
            raise WorkerDiedError(str(error)) from error
        self._in_flight.append(message)
        self._asked.append(_Asked.by(step))
        self.next_step += 1

    @property
    def awaits_allowed(self) -> bool:
        oldest = self._in_flight[0] if self._in_flight else None
        return oldest is not None and oldest.allowed_follow and oldest.step != self._allowed

    def allow(self, allowed: AllowedTokens) -> None:
        oldest = self._in_flight[0]
        self._allowed = oldest.step
        written = self._buffers.write(oldest.buffer, allowed_arrays(oldest.step, allowed), behind=oldest.layout)
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(Allow(oldest.step, written.layout, written.content))

    def await_ending(self) -> None:
        while self._in_flight and self._in_flight[-1].announce_ending and not self._has_ending():
            self._receive()

    def collect(self) -> StepOutput:
        while not self._replies:
            self._receive()
        reply = self._replies.popleft()
        expected = self._in_flight.popleft().step if self._in_flight else None
        if not isinstance(reply, StepDone | StepFailed) or reply.step != expected:
            wanted = "nothing" if expected is None else f"the reply to step {expected}"
            raise StepMismatchError(f"expected {wanted}, got {str(reply)[:100]}")
        asked = self._asked.popleft()
        if isinstance(reply, StepFailed):
            raise StepFailedError(reply.error)
        self.num_compilations = reply.num_compilations
        try:
            output = decode_output(reply)
            asked.check(output)
        except ProtocolError as error:
            raise WorkerDiedError(str(error)) from error
        return output

    def propose(self, continuations: Sequence[Continuation]) -> list[list[int]]:
        assert not self._in_flight
        try:
            self._channel.send(Propose(list(continuations)))
        except ChannelClosedError as error:
            raise WorkerDiedError(str(error)) from error
        while not self._replies:
            self._receive()
        reply = self._replies.popleft()
        if not isinstance(reply, Proposed):
            raise StepMismatchError(f"expected proposals, got {str(reply)[:100]}")
        if reply.error:
            logger.warning("the draft model failed: %s", reply.error)
            return [[] for _ in continuations]
        if len(reply.token_ids) != len(continuations):
            raise WorkerDiedError(f"expected {len(continuations)} proposals, got {len(reply.token_ids)}")
        for asked, token_ids in zip(continuations, reply.token_ids, strict=True):
            if len(token_ids) > asked.num_wanted:
                raise WorkerDiedError(f"expected at most {asked.num_wanted} tokens, got {len(token_ids)}")
        return reply.token_ids

    def _has_ending(self) -> bool:
        """Whether the newest step nears its end, or all steps have been replied to."""
        return self._ending == self._in_flight[-1].step or len(self._replies) == len(self._in_flight)

    def _receive(self) -> None:
        began = self._clock()
        timeout_s = self._step_timeout_s
        try:
            # What has arrived is taken even when no time is left.
            message = self._channel.receive(None if timeout_s is None else max(timeout_s - self._waited_s, 0.001))
        except DeadlineExceededError as error:
            raise WorkerDiedError(f"no reply within {timeout_s:g} s") from error
        except (ChannelClosedError, ProtocolError) as error:
            raise WorkerDiedError(str(error)) from error
        if isinstance(message, StepEnding):
            if not any(each.step == message.step and each.announce_ending for each in self._in_flight):
                raise StepMismatchError(f"the end of step {message.step} was announced, which nobody asked for")
            self._ending = message.step
            self._waited_s += self._clock() - began
            return
        self._replies.append(message)
        self._waited_s = 0.0

    def fileno(self) -> int | None:
        return self._channel.fileno()


def _owners_of(buffer: int, in_flight: Iterable[RunStep]) -> list[int]:
    """Steps whose arrays lie in the buffer and may still be read."""
    return [message.step for message in in_flight if message.buffer == buffer]
