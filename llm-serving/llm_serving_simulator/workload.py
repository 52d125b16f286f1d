"""The workload of a simulation: requests with their arrival times, and the YAML files that describe one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from llm_serving.config.yaml_reader import Located, read_yaml
from llm_serving.core.request_class import RequestClass
from llm_serving.errors import ConfigError

from llm_serving_simulator.files import MAX_INTEGER, MAX_NUMBER, REFERENCE, YamlMapping, integer, number, one_of
from llm_serving_simulator.files import share as parse_share
from llm_serving_simulator.files import text as parse_text

MAX_REQUESTS: Final = 200_000
MAX_TOKENS: Final = 100_000_000
"""Maximum number of tokens of all prompts and repeated answers of a stream."""
MAX_TENANTS: Final = 10_000
MAX_SECONDS: Final = 1e9
FIRST_TOKEN: Final = 3
"""Smallest token id of random prompts and answers."""
LENGTH_RULE: Final = (
    "must be an integer >= 1, {low, high} (uniform), {median, p99} (lognormal), or {values: {length: weight}}"
)

DrawLength = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    stream: str
    due_s: float
    """Arrival time since the start of the workload; in a closed loop, the start of the stream."""
    prompt_token_ids: list[int]
    num_output_tokens: int
    """Tokens after which the model ends the answer, unless `max_tokens` ends it earlier."""
    max_tokens: int
    ignore_eos: bool = False
    """Whether the request asks for exactly `max_tokens` tokens."""
    priority: int | None = None
    class_name: str | None = None
    """Request class, in place of a priority."""
    tenant: str = ""
    timeout_s: float | None = None
    cache_salt: str = ""
    answer_token_ids: Sequence[int] = ()
    """The answer as far as it is known; draft tokens are only proposed and accepted within it."""

    def priority_in(self, classes: Sequence[RequestClass]) -> int:
        """Return the request's priority, or that of its class. Raise KeyError for a class that is not one of these."""
        if self.class_name is None:
            return self.priority or 0
        return {each.name: each.rank for each in classes}[self.class_name]


@dataclass(frozen=True, slots=True)
class WorkloadStream:
    """Requests in the order of their arrival."""

    name: str
    requests: Sequence[WorkloadRequest]
    concurrency: int | None = None
    """Clients of a closed loop, each of which sends its next request after an answer; None: an open loop."""
    class_where: str = ""
    """File, line and key of the class that the stream names."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The request streams of one simulation."""

    name: str
    streams: tuple[WorkloadStream, ...]
    retries: int = 0
    """How often a client sends a refused request again, after the time of its Retry-After."""
    vocab_size: int = 32000
    notices: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        return sum(len(stream.requests) for stream in self.streams)

    @property
    def has_answer_texts(self) -> bool:
        """Whether any answer is known, so that speculative decoding has something to propose."""
        return any(each.answer_token_ids for stream in self.streams for each in stream.requests)

    def faster(self, factor: float) -> Workload:
        """Return the same requests at `factor` times the arrival rate; closed loops stay as they are."""
        streams = tuple(
            stream
            if stream.concurrency is not None
            else replace(stream, requests=[replace(each, due_s=each.due_s / factor) for each in stream.requests])
            for stream in self.streams
        )
        return replace(self, name=f"{self.name} x {factor:.3g}", streams=streams)


def read_workload(path: Path, seed: int | None = None) -> Workload:
    """Read a workload file (docs/reference/file_formats.md). ConfigError names file, line and rule."""
    return parse_workload(read_yaml(path, REFERENCE), path.stem, seed)


def parse_workload(root: Located, name: str, seed: int | None = None) -> Workload:
    keys = YamlMapping(root)
    file_seed = keys.read("seed", integer(), "must be an integer >= 0", 1)
    seed = file_seed if seed is None else seed
    duration_s = keys.read("duration_s", number(0, exclusive=True), "must be seconds > 0", math.inf)
    vocab_size = keys.read("vocab_size", integer(16), "must be an integer >= 16", 4096)
    retries = keys.read("retries", integer(), "must be an integer >= 0", 0)
    streams = [
        _stream(each, YamlMapping(located, f"streams.{each}"), random.Random(f"{seed} {each}"), duration_s, vocab_size)
        for each, located in keys.rows("streams")
    ]
    keys.reject_unknown_keys()
    if not streams:
        raise ConfigError(f"{keys.where}: `streams` must have at least one stream")
    if not any(stream.requests for stream in streams):
        raise ConfigError(f"{keys.where_of('streams')}: `streams` must have at least one request. Given: none")
    return Workload(name, tuple(streams), retries, vocab_size)


def _stream(name: str, keys: YamlMapping, rng: random.Random, duration_s: float, vocab_size: int) -> WorkloadStream:
    where = f"{keys.where}: `streams.{name}`"
    positive, count_rule = number(0, exclusive=True), "must be an integer >= 1"
    rate = keys.read("rate", positive, "must be requests a second > 0", math.inf)
    concurrency = keys.read("concurrency", integer(1, MAX_REQUESTS), count_rule, 0) or None
    if (rate == math.inf) == (concurrency is None):
        raise ConfigError(f"{where} must have either `rate` or `concurrency`")
    arrivals = keys.read("arrivals", one_of(tuple(ARRIVALS)), f"must be one of {', '.join(ARRIVALS)}", "poisson")
    burst_size = keys.read("burst_size", integer(1), count_rule, 8)
    begins_s = keys.read("begins_s", number(), "must be seconds >= 0", 0.0)
    ends_s = keys.read("ends_s", number(begins_s, exclusive=True), f"must be seconds > {begins_s:g}", duration_s)
    count = keys.read("requests", integer(1, MAX_REQUESTS), count_rule, 0)
    if not count and (concurrency is not None or ends_s == math.inf):
        rule = "`requests`" if concurrency is not None else "`requests`, `ends_s`, or `duration_s` of the workload"
        raise ConfigError(f"{where} must have {rule}")
    prompt = keys.read("prompt_tokens", _lengths, LENGTH_RULE)
    answer = keys.read("answer_tokens", _lengths, LENGTH_RULE)
    max_tokens = keys.read("max_tokens", integer(1), count_rule, 0)
    class_name = keys.read("class", parse_text, "must be the name of a class", "") or None
    priority = keys.read("priority", integer(-MAX_INTEGER), "must be an integer", 0)
    tenants = keys.read("tenants", _tenants, "must be an integer >= 1, or {name: weight}", {"": 1.0})
    prefix_tokens = keys.read("prefix_tokens", integer(1), count_rule, 0)
    num_prefixes = keys.read("prefixes", integer(1, MAX_REQUESTS), count_rule, 1)
    timeout_s = keys.read("timeout_s", positive, "must be seconds > 0", 0.0) or None
    repeated = keys.read("recited", parse_share, "must be a share from 0 to 1", 0.0)
    repeated_run = keys.read("recited_run", integer(1), count_rule, 32)
    _check_combinations(name, keys, bursts=arrivals == "burst")
    keys.reject_unknown_keys()

    def check_tokens(num_tokens: int) -> None:
        if num_tokens > MAX_TOKENS:
            rule = f"must have at most {MAX_TOKENS} tokens in its prompts and what is recited"
            raise ConfigError(f"{where} {rule}. Given: {num_tokens} and more")

    check_tokens(prefix_tokens * num_prefixes)
    prefixes = [rng.choices(range(FIRST_TOKEN, vocab_size), k=prefix_tokens) for _ in range(num_prefixes)]
    if concurrency is None:
        times = itertools.takewhile(lambda time: time < ends_s, ARRIVALS[arrivals](rng, rate, begins_s, burst_size))
        due = list(itertools.islice(times, count or MAX_REQUESTS + 1))
    else:
        due = [begins_s] * count
    if len(due) > MAX_REQUESTS:
        raise ConfigError(f"{where} must be at most {MAX_REQUESTS} requests")
    if due and due[-1] > MAX_SECONDS:
        rule = f"must have its last request within {MAX_SECONDS:g} seconds"
        raise ConfigError(f"{where} {rule}. Given: a request after {due[-1]:g}")
    requests, num_tokens = [], 0
    for time in due:
        num_prompt, num_output = prompt(rng), answer(rng)
        check_tokens(num_tokens := num_tokens + num_prompt)
        prefix = rng.choice(prefixes)[: max(0, num_prompt - 1)]
        prompt_ids = prefix + rng.choices(range(FIRST_TOKEN, vocab_size), k=num_prompt - len(prefix))
        tenant = rng.choices(list(tenants), list(tenants.values()))[0]
        limit = max_tokens or num_output
        answer_ids: list[int] = []
        if repeated:
            num_answer = min(num_output, limit)
            check_tokens(num_tokens := num_tokens + num_answer)
            answer_ids = repetitive_answer(rng, prompt_ids, num_answer, repeated, repeated_run, vocab_size)
        length = num_output, limit, not max_tokens
        requests.append(
            WorkloadRequest(
                name, time, prompt_ids, *length, priority, class_name, tenant, timeout_s, answer_token_ids=answer_ids
            )
        )
    class_where = f"{keys.where_of('class')}: `streams.{name}.class`" if class_name else ""
    return WorkloadStream(name, requests, concurrency, class_where)


def _check_combinations(name: str, keys: YamlMapping, *, bursts: bool) -> None:
    """Raise ConfigError for a key that has no effect beside, or without, another key."""
    needs_rate = "rate" in keys, "needs `rate`: a closed loop sends a request after each answer"
    for key, (is_valid, rule) in {
        "arrivals": needs_rate,
        "ends_s": needs_rate,
        "burst_size": (bursts, "needs `arrivals: burst`"),
        "priority": ("class" not in keys, "must be absent if `class` is set, which has a priority"),
        "prefixes": ("prefix_tokens" in keys, "needs `prefix_tokens`"),
        "recited_run": ("recited" in keys, "needs `recited`"),
    }.items():
        if key in keys and not is_valid:
            raise ConfigError(f"{keys.where_of(key)}: `streams.{name}.{key}` {rule}")


def repetitive_answer(
    rng: random.Random, prompt: Sequence[int], num_tokens: int, share: float, run: int, vocab_size: int
) -> list[int]:
    """Draw an answer that alternates between copies of earlier text, or of the prompt, and random tokens below
    `vocab_size`.

    The lengths of both are geometric, so a copied run continues with the same probability after every token. `share`:
    share of the answer that is copied. `run`: mean length of a copied run.
    """
    means = min(MAX_NUMBER, run * (1 - share) / share), run
    text, end = list(prompt), len(prompt) + num_tokens
    copies = rng.random() < share
    while len(text) < end:
        count = min(_geometric(rng, means[copies]), end - len(text))
        if copies:
            start = rng.randrange(len(text))
            for index in range(start, start + count):  # may read tokens that this loop appended
                text.append(text[index])
        else:
            text += rng.choices(range(FIRST_TOKEN, vocab_size), k=count)
        copies = not copies
    return text[len(prompt) :]


def _geometric(rng: random.Random, mean: float) -> int:
    """Draw an integer >= 0 of a geometric distribution."""
    return int(math.log(1.0 - rng.random()) / -math.log1p(1 / mean)) if mean > 0 else 0


def _poisson(rng: random.Random, rate: float, start_s: float, burst_size: int) -> Iterator[float]:
    while True:
        start_s += rng.expovariate(rate)
        yield start_s


def _fixed(rng: random.Random, rate: float, start_s: float, burst_size: int) -> Iterator[float]:
    return (start_s + index / rate for index in itertools.count())


def _burst(rng: random.Random, rate: float, start_s: float, burst_size: int) -> Iterator[float]:
    return (start_s + index // burst_size * burst_size / rate for index in itertools.count())


ARRIVALS: Final = {"poisson": _poisson, "fixed": _fixed, "burst": _burst}
"""Arrival processes by name."""


def _lengths(value: Any) -> DrawLength:
    if not isinstance(value, dict):
        length = integer(1)(value)
        return lambda rng: length
    match sorted(value):
        case ["high", "low"]:
            low, high = integer(1)(value["low"]), integer(value["low"])(value["high"])
            return lambda rng: rng.randint(low, high)
        case ["median", "p99"]:
            median = number(1)(value["median"])
            p99 = number(median)(value["p99"])
            sigma = math.log(p99 / median) / NormalDist().inv_cdf(0.99)
            return lambda rng: min(MAX_INTEGER, max(1, round(median * math.exp(sigma * rng.gauss(0, 1)))))
        case ["values"] if isinstance(value["values"], dict):
            lengths = [integer(1)(int(each)) for each in value["values"]]  # the YAML reader keeps keys as text
            weights = [number(0)(each) for each in value["values"].values()]
            if not sum(weights) > 0:
                raise ValueError
            return lambda rng: rng.choices(lengths, weights)[0]
    raise ValueError


def _tenants(value: Any) -> dict[str, float]:
    if isinstance(value, dict) and value:
        return {parse_text(name): number(0, exclusive=True)(weight) for name, weight in value.items()}
    return {f"tenant-{index}": 1.0 for index in range(integer(1, MAX_TENANTS)(value))}
