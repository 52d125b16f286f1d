"""An overloaded server in virtual time: refusals, retries, and the accuracy of predicted times to first token.

Admission control, scheduler and engine are the shipping ones. A step takes a fixed time and some more for each token,
both times a random factor. The event loop handles one attempt after the other, on a core that it shares with the steps,
and may stall. Clients arrive by a Poisson process, ask for as many tokens as the answers to the demo model's questions
have, and obey `Retry-After` unless a test says otherwise.

    python tests/tools/refused_load.py --seconds 30 --load 2 --cold
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.core.request_class import ANONYMOUS, Caller
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import StepInput, StepOutput, no_top_tokens
from llm_serving.core.timings import HttpTimings
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.replica import build_engine
from llm_serving.errors import CapacityError
from llm_serving.executor.executor import LocalExecutor
from llm_serving.observability.metrics import Metrics
from msgspec import structs
from support.fakes import DEMO_FOLDER, DEMO_TOKENIZER
from support.listeners import FunctionListener
from support.simulated_clock import Clock
from support.word_tokenizer import WordTokenizer

MODEL: Any = SimpleNamespace(vocab_size=1000, eos_token_ids=())
TOKENIZER: Any = WordTokenizer()
STEP_S, TOKEN_S = 0.003, 0.0001
ROUND_TRIP_S = 0.002
WARM_S = 2.0
MAX_TOKENS = 500


@dataclass(eq=False)
class Client:
    """A client with one question, which it sends until it is admitted or gives up."""

    number: int
    arrives: float
    prompt: tuple[int, ...]
    num_output: int
    source: str = "10.0.0.1"
    obeys: bool = True
    """Whether it waits for `Retry-After` before it retries."""
    max_tokens: int | None = None
    """The `max_tokens` of a request whose answer ends earlier by a stop token; None: the length of its answer."""
    caller: Caller = ANONYMOUS
    retry_afters_s: list[float] = field(default_factory=list)
    predicted_at_refusal_s: float | None = None
    """Predicted seconds from its first refusal to its first token."""
    admitted: float | None = None
    predicted_s: float | None = None
    """Predicted seconds from its admission to its first token."""
    first_token: float | None = None

    @property
    def real_s(self) -> float:
        """Seconds from its admission to its first token."""
        assert self.first_token is not None and self.admitted is not None
        return self.first_token - self.admitted


class World:
    """One server and its clients.

    Args:
        clients: The clients, in any order.
        slots: Running slots.
        max_waiting: Queue limit.
        noise: Spread of the factor that each step's time has, and of a slower one that changes every half second.
        attempt_s: Seconds of the event loop for each attempt, which delay the steps as well.
        schedule_s: Seconds in which the master schedules a step, while requests arrive.
        stall_s: Mean duration of the stalls of the event loop, about one a second.
        scheduler: Further settings.
    """

    def __init__(
        self,
        clients: Iterable[Client],
        *,
        slots: int = 32,
        max_waiting: int = 64,
        seed: int = 1,
        noise: float = 0.1,
        attempt_s: float = 0.0,
        schedule_s: float = 0.0,
        stall_s: float = 0.0,
        config: dict[str, Any] | None = None,
        **scheduler: Any,
    ) -> None:
        self.clock = Clock()
        self.clients = sorted(clients, key=lambda client: client.arrives)
        self.most_waiting = 0
        self.token_times: list[float] = []
        self._rng = random.Random(seed)
        self._noise = noise
        self._speed, self._speed_until = 1.0, 0.0
        self._attempt_s, self._stall_s = attempt_s, stall_s
        self._loop_free, self._next_stall, self._lost_s = 0.0, 0.0, 0.0
        self._ready = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._by_request: dict[str, Client] = {}
        served = ServingConfig(
            model=ModelConfig(max_generate_length=1024, decode_batch_size=slots),
            scheduler=SchedulerConfig(max_waiting_queue=max_waiting, speculative_method="none", **scheduler),
            **(config or {}),
        )
        metrics = Metrics(classes=served.request_classes)
        self.master = AsyncEngine(
            served, MODEL, TOKENIZER, metrics, lambda *_: contextlib.nullcontext(), clock=self.clock
        )
        self.master.replicas._loop = _Now()  # type: ignore[assignment]
        self.engine = build_engine(served, 4096, _Device(self), TOKENIZER, metrics, self._publish)
        self.engine._clock = self.engine._processor._clock = self.clock
        build_step = self.engine._build_step
        self.engine._build_step = lambda *step: self._schedule(schedule_s, build_step, *step)
        self.engine.add_listener(FunctionListener(on_started=self.master.replicas.on_started))
        self.master.replicas.engines[0] = self.engine
        for client in self.clients:
            self.at(client.arrives, lambda client=client: self._arrive(client))

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    def run(self, until: float = math.inf) -> None:
        """Run until no work is left, or until a time."""
        while self.clock.now < until:
            if self.engine.step():
                continue
            if self._events:
                self.pass_time(self._events[0][0])
            else:
                break

    def pass_time(self, until: float) -> None:
        """Advance the clock, and run the events of clients until then at their times."""
        while self._events and self._events[0][0] <= until:
            time, _, act = heapq.heappop(self._events)
            self.clock.now = max(self.clock.now, time)
            act()
        self.clock.now = max(self.clock.now, until)

    def seconds_of(self, num_tokens: int) -> float:
        now, rng = self.clock.now, self._rng
        if now >= self._speed_until:
            self._speed, self._speed_until = rng.lognormvariate(0.0, self._noise), now + 0.5
        lost_s, self._lost_s = self._lost_s, 0.0
        return lost_s + (STEP_S + TOKEN_S * num_tokens) * self._speed * rng.lognormvariate(0.0, self._noise)

    def _schedule(self, schedule_s: float, build_step: Callable[..., StepInput], *step: Any) -> StepInput:
        self.pass_time(self.clock.now + schedule_s)
        return build_step(*step)

    def _arrive(self, client: Client) -> None:
        """Send the request of a client once the event loop has time for it."""
        arrived = self.clock.now
        if self._stall_s and arrived >= self._next_stall:
            self._loop_free = max(self._loop_free, arrived) + self._rng.expovariate(1 / self._stall_s)
            self._next_stall = self._loop_free + self._rng.expovariate(1.0)
        handled = max(arrived, self._loop_free) + self._attempt_s
        if handled == arrived:
            self._ask(client, arrived)
            return
        self._loop_free = handled
        self._lost_s += self._attempt_s
        self.at(handled, lambda: self._ask(client, arrived))

    def _ask(self, client: Client, arrived: float | None = None) -> None:
        now = self.clock.now
        arrived = now if arrived is None else arrived
        sampling = SamplingParams(temperature=0.0, max_tokens=client.num_output, ignore_eos=True)
        if client.max_tokens is not None:
            last = (
                len(client.prompt) + client.num_output - 1
            )  # the fake model's token is the number of tokens before it
            sampling = replace(sampling, max_tokens=client.max_tokens, stop_token_ids=(last,))
        caller = structs.replace(client.caller, source=client.source, http_timings=HttpTimings(arrived))
        try:
            stream = self.master.generate(list(client.prompt), sampling, caller, request_id=str(client.number))
        except CapacityError as refusal:
            assert refusal.retry_after is not None and refusal.retry_after >= 1
            if client.predicted_at_refusal_s is None and refusal.predicted_s is not None:
                client.predicted_at_refusal_s = refusal.predicted_s
            client.retry_afters_s.append(refusal.retry_after)
            if client.obeys:
                later = now + refusal.retry_after + self._rng.uniform(0.0, ROUND_TRIP_S)
                self.at(later, lambda: self._arrive(client))
            return
        client.admitted, client.predicted_s = arrived, stream.predicted_s
        self._by_request[stream.request_id] = client
        self.most_waiting = max(self.most_waiting, self.master.num_waiting)

    def _publish(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            client = self._by_request[piece.request_id]
            self.token_times += [self.clock.now] * len(piece.token_ids)
            if piece.token_ids and client.first_token is None:
                client.first_token = self.clock.now
        self.master.replicas._publish(pieces)


class _Now:
    """An event loop that runs each callback at once."""

    def call_soon_threadsafe(self, callback: Callable[[Any], None], argument: object) -> None:
        callback(argument)


class _Device(LocalExecutor):
    """An executor with two steps in flight; the time of a step passes when the engine waits for it."""

    max_steps_in_flight = 2

    def __init__(self, world: World) -> None:
        super().__init__(self)
        self._world = world
        self._ready = 0.0
        self._due: list[float] = []

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        super().submit(step, announce_ending)
        self._ready = max(self._ready, self._world.clock.now) + self._world.seconds_of(len(step.token_ids))
        self._due.append(self._ready)

    def execute(self, step: StepInput) -> StepOutput:
        self._world.pass_time(self._due.pop(0))
        tokens = (step.num_computed + step.query_lens)[step.result_tokens[:, 0]] % 1000
        logprobs = np.zeros(len(tokens), np.float32)
        return StepOutput(step.step, tokens.astype(np.int32), logprobs, no_top_tokens(len(tokens)))


# --- the shipped load -------------------------------------------------------------------------------------------------


@functools.cache
def questions() -> list[tuple[tuple[int, ...], int]]:
    """Return (token ids of the prompt, tokens of the answer) for each of the demo model's questions."""
    encode = DEMO_TOKENIZER.encode
    return [
        (
            tuple([3 + token_id % (MODEL.vocab_size - 3) for token_id in encode(each["instruction"] + each["input"])]),
            1 + len(encode(each["output"])),
        )
        for each in json.loads((DEMO_FOLDER / "questions.json").read_text(encoding="utf-8"))
    ]


def shipped_questions(seed: int) -> list[tuple[tuple[int, ...], int]]:
    """Return `questions` in random order."""
    return random.Random(seed).sample(questions(), len(questions()))


def shipped_clients(rate: float, seconds: float, seed: int, start: float = 0.0, first: int = 0) -> list[Client]:
    """Return clients with Poisson arrivals from `start` on, numbered from `first` on."""
    rng = random.Random(seed)
    asked = itertools.cycle(shipped_questions(seed))
    clients, time = [], start
    while (time := time + rng.expovariate(rate)) < start + seconds:
        clients.append(Client(first + len(clients), time, *next(asked)))
    return clients


def warm_up(rate: float, first: int = 1_000_000) -> list[Client]:
    """Return the clients of a warm server, which bring 90 % of its capacity until second `WARM_S`."""
    return shipped_clients(0.9 * rate, WARM_S, 99, first=first)


def at_once(num: int, seed: int = 50, first: int = 2_000_000) -> list[Client]:
    """Return the few clients that a cold server has served before it is overloaded."""
    asked = shipped_questions(seed)
    return [Client(first + number, 0.0, *asked[number]) for number in range(num)]


def capacity(seed: int = 1, num: int = 600, **world: Any) -> float:
    """Return requests a second while all slots are taken: tokens until the last first token, over tokens a request."""
    asked = itertools.cycle(shipped_questions(seed))
    clients = [Client(number, 0.0, *next(asked)) for number in range(num)]
    full = World(clients, max_waiting=num, seed=seed, **world)
    full.run()
    until = max(client.first_token or 0.0 for client in clients)
    num_tokens = sum(time <= until for time in full.token_times)
    return num_tokens / until / (len(full.token_times) / num)


@dataclass(frozen=True)
class Outcome:
    """Numbers of refusals and retries, and the accuracy of predictions."""

    num_refusals: int
    num_retried: int
    num_admitted_at_retry: int
    max_refusals: int
    retry_after_p50_s: float
    accepted: Accuracy
    returned: Accuracy

    @property
    def first_retry_share(self) -> float:
        return self.num_admitted_at_retry / max(1, self.num_retried)


@dataclass(frozen=True)
class Accuracy:
    """Median of |predicted / real - 1|, and 99th percentile of the factor between the two, either way."""

    num: int
    median_error: float
    p99_factor: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Accuracy:
        """Return the accuracy of pairs of predicted and real seconds."""
        if not pairs:
            return cls(0, 0.0, 1.0)
        factors = sorted(max(predicted / real, real / predicted) for predicted, real in pairs)
        errors = [abs(predicted / real - 1) for predicted, real in pairs]
        return cls(len(pairs), statistics.median(errors), factors[min(len(factors) - 1, int(0.99 * len(factors)))])


def outcome(clients: Sequence[Client]) -> Outcome:
    delays = sorted(each for client in clients for each in client.retry_afters_s)
    back = [client for client in clients if client.retry_afters_s and client.obeys]
    admitted = [client for client in clients if client.first_token is not None]
    return Outcome(
        num_refusals=len(delays),
        num_retried=len(back),
        num_admitted_at_retry=sum(client.admitted is not None and len(client.retry_afters_s) == 1 for client in back),
        max_refusals=max((len(client.retry_afters_s) for client in clients), default=0),
        retry_after_p50_s=delays[len(delays) // 2] if delays else 0.0,
        accepted=Accuracy.of([(c.predicted_s, c.real_s) for c in admitted if c.predicted_s is not None]),
        returned=Accuracy.of(
            [
                (c.predicted_at_refusal_s, (c.first_token or 0.0) - c.arrives)
                for c in admitted
                if c.predicted_at_refusal_s is not None
            ]
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the arrivals")
    parser.add_argument("--load", type=float, default=2.0, help="arrival rate relative to the capacity")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--attempt-ms", type=float, default=0.0, help="event loop time of each attempt")
    parser.add_argument("--schedule-ms", type=float, default=0.0, help="time of the master to schedule a step")
    parser.add_argument(
        "--stall-ms", type=float, default=0.0, help="mean duration of event loop stalls, about one a second"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="only 16 requests were served before")
    parser.add_argument("--unknown", action="store_true", help="all requests have max_tokens 500")
    args = parser.parse_args()
    most = capacity(args.seed, max(600, 12 * args.slots), slots=args.slots, noise=args.noise)
    clients = shipped_clients(args.load * most, args.seconds, args.seed, start=WARM_S)
    warm = at_once(16) if args.cold else warm_up(most)
    if args.unknown:
        for client in (*warm, *clients):
            client.max_tokens = MAX_TOKENS
    world = World(
        [*warm, *clients],
        slots=args.slots,
        max_waiting=args.places,
        noise=args.noise,
        seed=args.seed,
        attempt_s=args.attempt_ms / 1000,
        schedule_s=args.schedule_ms / 1000,
        stall_s=args.stall_ms / 1000,
    )
    world.run()
    result = outcome(clients)
    lines = [
        f"capacity {most:.1f} requests/s, {len(clients)} clients, all answered after {world.clock.now:.1f} s",
        f"refusals {result.num_refusals}, at most {result.max_refusals} of a client; "
        f"Retry-After p50 {result.retry_after_p50_s:g} s",
        f"of {result.num_retried} clients that retried {result.first_retry_share:.1%} were admitted at the first",
        f"accepted: {result.accepted}",
        f"returned: {result.returned}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
