"""A whole replica in one process under a virtual clock, and everything that can go wrong with it, by seed.

The scheduler, the blocks, the engine, the executors and the frames of the protocol are the shipping ones; the process
of the WorkAgent, its socket and its model are simulated. A simulated WorkAgent may be slow, hang, die before or after
it computed, fail a step, answer twice, answer another step or garbage; it may read a step as soon as it is sent or only
when the master waits. After every step the laws that hold at every moment are checked; at the end, that every request
has ended and that what it got is what it would have got alone.

    python tests/simulation.py --seeds 100000
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import socket
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, fields
from multiprocessing import Pool
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from factories import create_classes, create_request, create_scheduler
from fake_runner import FakeRunner, expected_output
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.engine import supervised_executor
from llm_serving.engine.engine import Engine
from llm_serving.engine.metrics import Metrics
from llm_serving.engine.supervised_executor import SupervisedExecutor
from llm_serving.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    TransportError,
    WorkerDiedError,
    WorkerError,
)
from llm_serving.scheduler import PreemptionMode
from llm_serving.transport.codec import encode_output, step_from_arrays
from llm_serving.transport.messages import AgentMessage, Loaded, RunStep, StepDone, StepFailed
from llm_serving.transport.shared_arrays import SharedBuffers
from word_tokenizer import WordTokenizer

STEP_TIMEOUT_S = 1.0
NUM_BUFFERS = 2
BUFFER_BYTES = 1 << 17
FATES = ("slow", "hang", "die before", "die after", "fail", "twice", "other step", "garbage", "lost")
MAX_ROUNDS = 4000
TOKENIZER = WordTokenizer()


class Clock:
    """Seconds that pass only when the simulation says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Faults:
    """What goes wrong at which step; never two things within `distance` steps, so that nobody looks guilty."""

    def __init__(self, rng: random.Random, rate: float, distance: int) -> None:
        self._rng = rng
        self._rate = rate
        self._distance = distance
        self._since = 0
        self.counts: Counter[str] = Counter()

    def draw(self) -> str:
        self._since += 1
        if self._since <= self._distance or self._rng.random() >= self._rate:
            return ""
        self._since = 0
        fate = self._rng.choice(FATES)
        self.counts[fate] += 1
        return fate


class SimulatedAgent:
    """Both ends of a connection and the WorkAgent behind it; has the methods of a channel and of its process."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        blocks = simulation.scheduler.blocks
        self.loaded = Loaded(blocks.pool.num_blocks, blocks.host_pool.num_blocks, "")
        self.channel: Any = self
        self.buffers = SharedBuffers.create(NUM_BUFFERS, BUFFER_BYTES)
        self._mapping = SharedBuffers(self.buffers.fd, NUM_BUFFERS, BUFFER_BYTES)
        self._runner = FakeRunner(blocks.pool.num_blocks, blocks.block_size, blocks.host_pool.num_blocks)
        self._reads_at_once = simulation.rng.random() < 0.5
        self._unread: deque[RunStep] = deque()
        self._replies: deque[AgentMessage | Exception] = deque()
        self._dead = self._hangs = False
        self._read_fd, self._write_fd = socket.socketpair()

    # --- as a process -----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        if self._mapping is not None:
            for end in (self._read_fd, self._write_fd):
                end.close()
            self._mapping.close()
            self.buffers.close()
            os.close(self.buffers.fd)
            self._mapping = None
        self._dead = True

    stop = kill

    # --- as a channel -----------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._read_fd.fileno()

    def send(self, message: RunStep) -> None:
        if self._dead:
            raise ChannelClosedError("the other side is gone")
        self._unread.append(message)
        if self._reads_at_once:
            self._work()

    def receive(self, timeout_s: float | None = None) -> AgentMessage:
        clock = self.simulation.clock
        if not self._replies:
            self._work()
        if self._replies:
            reply = self._replies.popleft()
            if isinstance(reply, Exception):
                raise reply
            return reply
        if self._hangs:
            clock.now += timeout_s or 0.0
            raise DeadlineExceededError("no complete frame arrived in time")
        raise ChannelClosedError("the other side closed the connection")

    # --- as a WorkAgent ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._unread and not self._dead and not self._hangs:
            self._step(self._unread.popleft(), self.simulation.faults.draw())

    def _step(self, message: RunStep, fate: str) -> None:
        rng, clock = self.simulation.rng, self.simulation.clock
        clock.now += rng.uniform(0.001, 0.01)
        if fate == "slow":
            clock.now += rng.uniform(0.1, 0.9)
        if fate in ("hang", "lost"):
            self._hangs = True
            if fate == "hang":
                return
        if fate == "die before":
            self._dead = True
            return
        try:
            step = step_from_arrays(message.step, self._mapping.read(message.buffer, message.layout))
        except TransportError:  # ends a WorkAgent
            self._dead = True
            return
        reply: AgentMessage
        try:
            reply = encode_output(self._runner.execute(step))
        except WorkerError as error:
            self._replies.append(StepFailed(message.step, str(error)))
            return
        if fate == "lost":
            return
        if fate == "die after":
            self._dead = True
            return
        if fate == "fail":
            reply = StepFailed(message.step, "RuntimeError: out of luck")
        if fate == "other step":
            reply = StepFailed(message.step + rng.choice((-1, 1)), "")
        if fate == "garbage":
            assert isinstance(reply, StepDone)
            reply = StepDone(reply.step, reply.token_ids + b"?", *[getattr(reply, name) for name in _REST])
        self._replies.append(reply)
        if fate == "twice":
            self._replies.append(reply)


_REST = ("logprobs", "top_token_ids", "top_logprobs", "num_top", "row_errors")


@dataclass
class Arrival:
    at_round: int
    request: Request
    abort_at_round: int | None = None


@dataclass
class Simulation:
    """One seed: a configuration, a load and a fate for every step."""

    seed: int
    rng: random.Random = field(init=False)
    num_steps: int = 0

    def __post_init__(self) -> None:
        """Draws everything in a fixed order."""
        self.rng = rng = random.Random(self.seed)
        self.clock = Clock()
        self.faults = Faults(rng, rate=rng.choice((0.0, 0.05, 0.3)), distance=rng.choice((0, 25)))
        share = rng.choice((1.0, 1.0, 0.5))
        self.scheduler = create_scheduler(
            policy=rng.choice(("prefill_first", "prefill_first", "decode_first", "mixed", "throughput", "fcfs")),
            num_blocks=rng.choice((12, 13, 15, 18, 40)),
            block_size=4,
            num_swap_blocks=rng.choice((0, 8, 30)),
            prefix_caching=rng.random() < 0.6,
            max_num_batched_tokens=rng.choice((8, 16, 48)),
            max_num_seqs=rng.choice((2, 4, 8)),
            max_prefill_seqs=rng.choice((1, 3, 8)),
            max_model_len=48,
            max_decode_gap=rng.choice((1, 2, 4)),
            max_prefill_gap=rng.choice((1, 4)),
            max_preemptions=rng.choice((0, 1, 3)),
            max_overtakes=rng.choice((0, 2)),
            max_long_prefill_tokens=rng.choice((None, 6)),
            separate=rng.random() < 0.3,
            preemption_mode=rng.choice(list(PreemptionMode)),
            static_batching=rng.random() < 0.1,
            classes=create_classes(
                ageing_steps=rng.choice((2, 20)), low={"max_running_share": share, "max_kv_share": share}
            ),
        )
        self.pieces: dict[str, list[RequestOutput]] = defaultdict(list)
        self.metrics = Metrics()
        self.agents: list[SimulatedAgent] = []
        self.arrivals = self._make_load()
        self.executor = SupervisedExecutor(self._start, STEP_TIMEOUT_S, max_restarts=rng.choice((2, 50)))
        self.engine = Engine(
            self.scheduler,
            self.executor,
            TOKENIZER,
            self.metrics,
            self._publish,
            clock=self.clock,
            max_steps_in_flight=rng.choice((1, 2)),
            audit_every=1,
        )

    def run(self) -> None:
        """Plays the seed to its end.

        Raises:
            AssertionError: A law is broken.
        """
        try:
            for round_number in range(MAX_ROUNDS):
                self._let_in(round_number)
                if not self._step() and round_number > self.arrivals[-1].at_round:
                    break
            else:
                raise AssertionError("the engine does not come to an end")
            self._check_end()
        finally:
            self.executor.close()
            os.close(self.engine._wake_fd)

    # --- the load ---------------------------------------------------------------------------------------------------

    def _make_load(self) -> list[Arrival]:
        rng, arrivals = self.rng, []
        for number in range(rng.randint(1, 12)):
            num_prompt = rng.randint(1, 28)
            request = create_request(
                num_prompt,
                request_id=f"{number}",
                priority=rng.randint(-2, 2),
                tenant=rng.choice("abc"),
                max_tokens=rng.randint(1, 16),
                seed=rng.randint(0, 3),
                stop_token_ids=frozenset(rng.sample(range(1000), 20)) if rng.random() < 0.3 else frozenset(),
            )
            at_round = rng.randint(0, 40)
            if arrivals and rng.random() < 0.25:  # another choice for the prompt of the one before
                before = arrivals[-1]
                request.prompt_token_ids = list(before.request.prompt_token_ids)
                request.fork_of, request.tenant = before.request.request_id, before.request.tenant
                at_round = before.at_round
            abort = at_round + rng.randint(0, 30) if rng.random() < 0.2 else None
            arrivals.append(Arrival(at_round, request, abort))
        return sorted(arrivals, key=lambda arrival: arrival.at_round)

    def _let_in(self, round_number: int) -> None:
        for arrival in self.arrivals:
            with contextlib.suppress(WorkerDiedError):
                if arrival.at_round == round_number:
                    arrival.request.arrival_time = self.clock.now
                    self.engine.submit(arrival.request)
                if arrival.abort_at_round == round_number:
                    self.engine.abort(arrival.request.request_id)

    # --- the engine -------------------------------------------------------------------------------------------------

    def _start(self, like: Loaded | None) -> SimulatedAgent:
        if like is not None and self.faults._rate and self.rng.random() < 0.2:
            raise WorkerDiedError("it ended before it was ready")
        self.agents.append(SimulatedAgent(self))
        return self.agents[-1]

    def _publish(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            told = self.pieces[piece.request_id]
            assert not (told and told[-1].finished), f"{piece.request_id} is told something after its end"
            told.append(piece)

    def _step(self) -> bool:
        if self.engine.dead is not None:
            return False
        try:
            progressed = self.engine.step()
        except WorkerDiedError as error:  # given up, as `Engine.run` meets it
            self.engine._end(str(error))
            progressed = False
        self.num_steps += 1
        self.scheduler.check_integrity()
        assert self.metrics._counts["llm_serving:bound_violations_total"] == 0, "a bound on waiting is broken"
        assert self.metrics._counts["llm_serving:audit_mismatch_total"] == 0, "an audit found another answer"
        return progressed

    # --- the laws ---------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        assert not self.scheduler.has_unfinished_requests
        blocks = self.scheduler.blocks
        assert blocks.pool.num_used_blocks == blocks.host_pool.num_used_blocks == 0
        for arrival in self.arrivals:
            self._check_answer(arrival)

    def is_garbled(self, arrival: Arrival) -> bool:
        """Whether the request was told anything that it would not have been told alone."""
        given = [token for piece in self.pieces[arrival.request.request_id] for token in piece.token_ids]
        return given != answer_alone(arrival.request)[: len(given)]

    def _check_answer(self, arrival: Arrival) -> None:
        request, pieces = arrival.request, self.pieces[arrival.request.request_id]
        if not pieces:
            assert self.engine.dead is not None, f"{request.request_id} has vanished"
            return
        assert pieces[-1].finished, f"{request.request_id} waits for ever"
        given = [token for piece in pieces for token in piece.token_ids]
        alone = answer_alone(request)
        reason = pieces[-1].finish_reason
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert given == alone[: len(given)], f"{request.request_id} was told something else than it would be alone"
        else:
            assert given == alone, f"{request.request_id} has another answer than alone"
        if reason is FinishReason.ABORT:
            assert arrival.abort_at_round is not None
        if reason is FinishReason.ERROR:
            unlucky = self.engine.dead is not None or (self.faults.counts and self.faults._distance == 0)
            assert unlucky, f"{request.request_id} ended with an error that it did not cause"


def answer_alone(request: Request) -> list[int]:
    tokens = expected_output(request.prompt_token_ids, request.sampling.max_tokens, request.sampling.seed)
    ends = [index for index, token in enumerate(tokens) if token in request.stop_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


@dataclass
class Totals:
    num_seeds: int = 0
    num_steps: int = 0
    num_restarts: int = 0
    num_preempted: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def run_seeds(first: int, count: int) -> Totals:
    """Plays seeds `first` .. `first + count - 1`.

    Raises:
        AssertionError: One breaks a law; the text has the command that repeats it.
    """
    totals = Totals()
    delay, supervised_executor.FIRST_DELAY_S = supervised_executor.FIRST_DELAY_S, 0.0  # type: ignore[misc]
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(first, first + count):
            simulation = Simulation(seed)
            try:
                simulation.run()
            except Exception as error:
                command = f"python tests/simulation.py --first {seed} --seeds 1"
                raise AssertionError(f"seed {seed}: {error}\nrepeat it with: {command}") from error
            totals.num_seeds += 1
            totals.num_steps += simulation.num_steps
            totals.num_restarts += len(simulation.agents) - 1
            totals.num_preempted += sum(arrival.request.num_preemptions for arrival in simulation.arrivals)
            totals.faults.update(simulation.faults.counts)
    finally:
        supervised_executor.FIRST_DELAY_S = delay  # type: ignore[misc]
        logging.disable(logging.NOTSET)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--processes", type=int, default=1, help="processes that share them (default: 1)")
    args = parser.parse_args()
    began = time.perf_counter()
    shares = [
        (first, min(100, args.first + args.seeds - first)) for first in range(args.first, args.first + args.seeds, 100)
    ]
    with Pool(args.processes) as pool:
        totals = sum(pool.starmap(run_seeds, shares, chunksize=1), Totals())
    seconds = time.perf_counter() - began
    faults = ", ".join(f"{name} {count:,}" for name, count in sorted(totals.faults.items()))
    sys.stdout.write(
        f"{totals.num_seeds:,} seeds in {seconds:.1f} s ({totals.num_seeds / seconds:.0f} a second), "
        f"{totals.num_steps:,} rounds of the engine, {totals.num_preempted:,} preemptions, "
        f"{totals.num_restarts:,} restarts; faults: {faults or 'none'}; no law broken\n"
    )


if __name__ == "__main__":
    main()
