"""A WorkAgent without a process, whose faults are drawn and whose time is that of the simulation."""

from __future__ import annotations

import random
import socket
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from llm_serving.core.step import AllowedTokens, BlockMoveKind
from llm_serving.engine.engine import SHORT_STEP_S
from llm_serving.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    TransportError,
    WorkerError,
)
from llm_serving.kvcache import BlockManager
from llm_serving.transport.codec import ALLOWED_TYPES, STEP_TYPES, allowed_from_arrays, encode_output, step_from_arrays
from llm_serving.transport.messages import (
    AgentMessage,
    Loaded,
    RunStep,
    SetAllowedTokens,
    StepDone,
    StepEnding,
    StepFailed,
)
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers, num_bytes
from msgspec.structs import replace
from support.fake_runner import VOCAB_SIZE, FakeRunner, FakeTransferPool
from support.simulated_block_link import SimulatedBlockLink
from support.simulated_clock import Clock
from support.simulated_network import AgentLocation

NUM_BUFFERS = 2
BUFFER_BYTES = 1 << 17
FAULTS = ("slow", "hang", "die before", "die after", "fail", "twice", "other step", "garbage", "lost", "bad row")
WITHOUT_ALLOWED = ("hang", "die before")
"""Faults for which the WorkAgent does not need the allowed tokens of the step."""
BAD_ROW = "no token can be chosen: all logits are NaN"
POISON = VOCAB_SIZE
"""A token whose step always fails."""


class Faults:
    """Faults of steps, at least `distance` steps apart, so that no request is suspected of two."""

    def __init__(self, rng: random.Random, rate: float, distance: int, poison_kills: bool) -> None:
        self.rate = rate
        self.distance = distance
        self.poison_kills = poison_kills
        """Whether a poison token kills the WorkAgent; otherwise it fails the step."""
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._since = 0

    def draw(self) -> str:
        self._since += 1
        if self._since <= self.distance or self._rng.random() >= self.rate:
            return ""
        self._since = 0
        fault = self._rng.choice(FAULTS)
        self.counts[fault] += 1
        return fault


class SimulatedAgent:
    """Both ends of a connection and the WorkAgent, with the methods of a channel and of a process.

    Args:
        rng: Draws durations and results of faults.
        clock: Advanced by the duration of steps.
        faults: Draws the fault of each step.
        blocks: Blocks of the master; the WorkAgent's caches have the same sizes.
        meanwhile: Called while the master waits for a reply.
        location: The machine of a cluster; None: the master's machine.
        answers: Replies so far; further ones are added.
        transfer: Transfer pool; None: requests do not migrate.
    """

    def __init__(
        self,
        rng: random.Random,
        clock: Clock,
        faults: Faults,
        blocks: BlockManager,
        meanwhile: Callable[[], None],
        location: AgentLocation | None = None,
        answers: list[AgentMessage] | None = None,
        transfer: FakeTransferPool | None = None,
    ) -> None:
        self.loaded = Loaded(blocks.pool.num_blocks, blocks.host_pool.num_blocks, "")
        self.channel: Any = self
        self._location = location
        self.buffers: SharedBuffers | InlineArrays
        if location is None:
            self.buffers = SharedBuffers.create(NUM_BUFFERS, BUFFER_BYTES)
        else:
            self.buffers = InlineArrays(NUM_BUFFERS)
        self.block_moves: Counter[int] = Counter()
        """Number of moves by `BlockMoveKind`."""
        self._rng, self._clock, self._faults, self._meanwhile = rng, clock, faults, meanwhile
        self._mapping: SharedBuffers | InlineArrays | None = self.buffers
        if isinstance(self.buffers, SharedBuffers):
            self._mapping = SharedBuffers(self.buffers.fd, NUM_BUFFERS, BUFFER_BYTES)
        sizes = blocks.pool.num_blocks, blocks.block_size, blocks.host_pool.num_blocks
        self.machine = ""
        self.block_link: Any = None
        if location is not None and transfer is not None:  # each machine has a transfer pool of its own
            transfer = FakeTransferPool(len(transfer.blocks))
            self.block_link = SimulatedBlockLink(rng, transfer, location, self._end)
        num_slots = 0 if blocks.states is None else blocks.states.pool.num_blocks
        self._runner = FakeRunner(*sizes, blocks.groups, transfer, num_slots)
        self._reads_at_once = rng.random() < 0.5
        self._unread: deque[RunStep | SetAllowedTokens] = deque()
        self._next_fault: str | None = None
        """The drawn fault of the next step."""
        self._answers = [] if answers is None else answers
        self._replies: deque[AgentMessage] = deque(self._answers)
        self._dead = self._hangs = False
        self._read_end, self._write_end = socket.socketpair()

    # --- methods of a process ---------------------------------------------------------------------------------------

    def kill(self) -> None:
        if self._mapping is not None:
            self._read_end.close()
            self._write_end.close()
            self._mapping.close()
            self.buffers.close()
            self._mapping = None
        if self.block_link is not None:
            self.block_link.close()
        self._dead = True

    stop = kill

    # --- methods of a channel ---------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._read_end.fileno()

    def send(self, message: RunStep | SetAllowedTokens) -> None:
        if self._dead:
            raise ChannelClosedError("the peer is gone")
        self._unread.append(message)
        if self._location is not None and isinstance(message, RunStep):
            self._location.draw_event()
        if self._reads_at_once:
            self._work()

    def receive(self, timeout_s: float | None = None) -> AgentMessage:
        assert self._mapping is not None, "a frame of an earlier start is read"
        self._meanwhile()
        if not self._replies:
            self._work()
        if self._location is not None:
            self._cross(self._location, timeout_s)
        if self._replies:
            return self._replies.popleft()
        if self._hangs:
            self._clock.now += timeout_s or 0.0
            raise DeadlineExceededError("no complete frame arrived in time")
        raise ChannelClosedError("the peer closed the connection")

    def _cross(self, location: AgentLocation, timeout_s: float | None) -> None:
        """Wait for the link, unless a reply was sent before it was cut."""
        while not location.is_reachable and not (self._replies and location.passes("from")):
            location.wait(timeout_s)
            if not self._replies:
                self._work()
        location.spend_delay()

    def _end(self) -> None:
        self._dead = True

    # --- the WorkAgent ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._location is not None and self._location.is_lost:
            self._dead = True
        while (
            self._unread
            and not self._dead
            and not self._hangs
            and (self._location is None or self._location.passes("to"))
        ):
            message = self._unread[0]
            if isinstance(message, SetAllowedTokens):  # belongs to a step that failed
                self._unread.popleft()
                continue
            if self._next_fault is None:
                self._next_fault = self._faults.draw()
            if message.allowed_follow and len(self._unread) == 1 and self._next_fault not in WITHOUT_ALLOWED:
                return
            self._unread.popleft()
            fault, self._next_fault = self._next_fault, None
            self._step(message, fault)

    def _allowed(self, step: RunStep) -> AllowedTokens:
        message = self._unread.popleft()
        assert isinstance(message, SetAllowedTokens) and message.step == step.step
        assert self._mapping is not None
        behind = num_bytes(step.shapes, STEP_TYPES)
        arrays = self._mapping.read(step.buffer, message.shapes, ALLOWED_TYPES, message.content, behind)
        return allowed_from_arrays(step.step, arrays)

    def _step(self, message: RunStep, fault: str) -> None:
        rng, clock = self._rng, self._clock
        clock.now += rng.uniform(0.001, 2 * SHORT_STEP_S)
        if fault == "slow":
            clock.now += rng.uniform(0.1, 0.9)
        if fault in ("hang", "lost"):
            self._hangs = True
            if fault == "hang":
                return
        if fault == "die before":
            self._dead = True
            return
        try:
            assert self._mapping is not None
            arrays = self._mapping.read(message.buffer, message.shapes, STEP_TYPES, message.content)
            step = step_from_arrays(message.step, arrays, message.allowed_follow)
        except TransportError:  # such an error ends a WorkAgent
            self._dead = True
            return
        if message.announce_ending:
            self._answer(StepEnding(message.step))
        try:
            output = self._runner.execute(step, partial(self._allowed, message))
        except WorkerError as error:
            self._answer(StepFailed(message.step, str(error)))
            return
        if len(step.block_moves):
            self.block_moves.update(step.block_moves[:, 0].tolist())
        self.block_moves[BlockMoveKind.EXPORT] += len(step.exports)
        if POISON in step.token_ids.tolist():
            fault = "die after" if self._faults.poison_kills else "fail"
        if fault == "lost":
            return
        if fault == "die after":
            self._dead = True
            return
        if fault == "bad row" and len(output.token_ids):
            sample = rng.randrange(len(output.token_ids))
            output.token_ids[sample] = -1
            output = replace(output, row_errors={sample: BAD_ROW})
        reply: AgentMessage = encode_output(output)
        if fault == "fail":
            reply = StepFailed(message.step, "RuntimeError: out of luck")
        if fault == "other step":
            reply = StepFailed(message.step + rng.choice((-1, 1)), "")
        if fault == "garbage":
            reply = _garbage(rng, encode_output(output))
        self._answer(reply)
        if fault == "twice":
            self._answer(reply)

    def _answer(self, message: AgentMessage) -> None:
        self._replies.append(message)
        if self._location is not None:
            self._answers.append(message)


def _garbage(rng: random.Random, reply: StepDone) -> StepDone:
    """Return a reply with invalid arrays, or with results that were not requested."""
    token_ids, logprobs, *others = reply.arrays
    if not others:
        others = [bytes(len(token_ids) + 4), b"", b"", b"", b"", bytes(4), b"", b"", b""]
    of_top, scores, vectors = others[:3], [b"", b"", bytes(8), b"", b""], others[8]
    garbage: tuple[dict[str, Any], ...] = (
        {"arrays": (token_ids + b"?", *reply.arrays[1:])},
        {"arrays": (token_ids + bytes(4), logprobs + bytes(4))},
        {"arrays": (token_ids, logprobs, *of_top, *scores, vectors)},
        {"arrays": (token_ids, logprobs, *others[:8], bytes(4)), "num_vectors": 1 + reply.num_vectors},
    )
    return msgspec.structs.replace(reply, **rng.choice(garbage))
