"""A load as a person describes it: streams with rates, lengths, classes, tenants and prefixes, drawn by a seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from llm_serving.config.yaml_reader import Located, read_yaml
from llm_serving.errors import ConfigError

from llm_serving_simulator.document import KEYS_IN, MOST, MOST_WHOLE, Mapping, number, one_of, text, whole
from llm_serving_simulator.load import Asked, Load, Stream

Draw = Callable[[random.Random], int]

MAX_REQUESTS: Final = 200_000
MAX_TOKENS: Final = 100_000_000
"""Of all prompts of a load."""
MAX_TENANTS: Final = 10_000
MAX_SECONDS: Final = 1e9
"""Until the last request comes."""
LENGTH_RULE: Final = (
    "must be an integer >= 1, {low, high} (uniform), {median, p99} (lognormal), or {values: {length: weight}}"
)


def read_workload(path: Path, seed: int | None = None) -> Load:
    """Reads a workload file.

    Args:
        path: YAML; docs/tuning.md has its keys.
        seed: In place of that of the file.

    Raises:
        ConfigError: With file, line and rule.
    """
    return workload(read_yaml(path, KEYS_IN), path.stem, seed)


def workload(root: Located, name: str, seed: int | None = None) -> Load:
    """As `read_workload`, of what has been read."""
    document = Mapping(root)
    own_seed = document.take("seed", whole(), "must be an integer >= 0", 1)
    seed = own_seed if seed is None else seed
    duration_s = document.take("duration_s", number(0, above=True), "must be seconds > 0", math.inf)
    vocab_size = document.take("vocab_size", whole(16), "must be an integer >= 16", 4096)
    retries = document.take("retries", whole(), "must be an integer >= 0", 0)
    streams = [
        _stream(each, Mapping(located, f"streams.{each}"), random.Random(f"{seed} {each}"), duration_s, vocab_size)
        for each, located in document.rows("streams")
    ]
    document.end()
    if not streams:
        raise ConfigError(f"{document.where}: `streams` must have at least one stream")
    if not any(stream.requests for stream in streams):
        raise ConfigError(
            f"{document.where_of('streams')}: `streams` must have at least one request. Given: none comes"
        )
    return Load(name, tuple(streams), retries, vocab_size)


def _stream(name: str, keys: Mapping, rng: random.Random, duration_s: float, vocab_size: int) -> Stream:
    positive = number(0, above=True)
    rate = keys.take("rate", positive, "must be requests a second > 0", math.inf)
    concurrency = keys.take("concurrency", whole(1, MAX_REQUESTS), "must be an integer >= 1", 0) or None
    if (rate == math.inf) == (concurrency is None):
        raise ConfigError(f"{keys.where}: `streams.{name}` must have either `rate` or `concurrency`")
    arrivals = keys.take("arrivals", one_of(tuple(ARRIVALS)), f"must be one of {', '.join(ARRIVALS)}", "poisson")
    burst_size = keys.take("burst_size", whole(1), "must be an integer >= 1", 8)
    begins_s = keys.take("begins_s", number(), "must be seconds >= 0", 0.0)
    ends_s = keys.take("ends_s", number(begins_s, above=True), f"must be seconds > {begins_s:g}", duration_s)
    count = keys.take("requests", whole(1, MAX_REQUESTS), "must be an integer >= 1", 0)
    if not count and (concurrency is not None or ends_s == math.inf):
        rule = "`requests`" if concurrency is not None else "`requests`, `ends_s`, or `duration_s` beside `streams`"
        raise ConfigError(f"{keys.where}: `streams.{name}` must have {rule}")
    prompt = keys.take("prompt_tokens", _lengths, LENGTH_RULE)
    answer = keys.take("answer_tokens", _lengths, LENGTH_RULE)
    max_tokens = keys.take("max_tokens", whole(1), "must be an integer >= 1", 0)
    class_name = keys.take("class", text, "must be the name of a class", "") or None
    priority = keys.take("priority", whole(-MOST_WHOLE), "must be an integer", 0)
    tenants = keys.take("tenants", _tenants, "must be an integer >= 1, or {name: weight}", {"": 1.0})
    prefix = keys.take("prefix_tokens", whole(1), "must be an integer >= 1", 0)
    prefixes = keys.take("prefixes", whole(1, MAX_REQUESTS), "must be an integer >= 1", 1)
    timeout_s = keys.take("timeout_s", positive, "must be seconds > 0", 0.0) or None
    recited = keys.take("recited", _share, "must be a share from 0 to 1", 0.0)
    recited_run = keys.take("recited_run", whole(1), "must be an integer >= 1", 32)
    _check_together(name, keys, bursts=arrivals == "burst")
    keys.end()
    if prefix * prefixes > MAX_TOKENS:
        raise _too_many_tokens(keys, name, prefix * prefixes)
    beginnings = [rng.choices(range(3, vocab_size), k=prefix) for _ in range(prefixes)]
    if concurrency is None:
        times = itertools.takewhile(lambda time: time < ends_s, ARRIVALS[arrivals](rng, rate, begins_s, burst_size))
        due = list(itertools.islice(times, count or MAX_REQUESTS + 1))
    else:
        due = [begins_s] * count
    if len(due) > MAX_REQUESTS:
        raise ConfigError(f"{keys.where}: `streams.{name}` must be at most {MAX_REQUESTS} requests")
    if due and due[-1] > MAX_SECONDS:
        rule = f"must have its last request within {MAX_SECONDS:g} seconds"
        raise ConfigError(f"{keys.where}: `streams.{name}` {rule}. Given: it comes after {due[-1]:g}")
    requests, num_tokens = [], 0
    for time in due:
        num_prompt, num_output = prompt(rng), answer(rng)
        if (num_tokens := num_tokens + num_prompt) > MAX_TOKENS:
            raise _too_many_tokens(keys, name, num_tokens)
        begin = rng.choice(beginnings)[: max(0, num_prompt - 1)]
        rest = rng.choices(range(3, vocab_size), k=num_prompt - len(begin))
        tenant = rng.choices(list(tenants), list(tenants.values()))[0]
        most = max_tokens or num_output
        length = num_output, most, not max_tokens
        answer_ids: list[int] = []
        if recited:
            num_said = min(num_output, most)
            if (num_tokens := num_tokens + num_said) > MAX_TOKENS:
                raise _too_many_tokens(keys, name, num_tokens)
            answer_ids = recite(rng, begin + rest, num_said, recited, recited_run, vocab_size)
        requests.append(
            Asked(
                name, time, begin + rest, *length, priority, class_name, tenant, timeout_s, answer_token_ids=answer_ids
            )
        )
    where = f"{keys.where_of('class')}: `streams.{name}.class`" if class_name else ""
    return Stream(name, requests, concurrency, where)


def _check_together(name: str, keys: Mapping, *, bursts: bool) -> None:
    """Raises ConfigError for a key that would say nothing beside the others, or without another."""
    of_rate = "rate" in keys, "must stand beside `rate`: a closed loop asks when it has been answered"
    for key, (fits, rule) in {
        "arrivals": of_rate,
        "ends_s": of_rate,
        "burst_size": (bursts, "must stand beside `arrivals: burst`"),
        "priority": ("class" not in keys, "must not stand beside `class`, which has one"),
        "prefixes": ("prefix_tokens" in keys, "must stand beside `prefix_tokens`"),
        "recited_run": ("recited" in keys, "must stand beside `recited`"),
    }.items():
        if key in keys and not fits:
            raise ConfigError(f"{keys.where_of(key)}: `streams.{name}.{key}` {rule}")


def _too_many_tokens(keys: Mapping, name: str, given: int) -> ConfigError:
    rule = f"must have at most {MAX_TOKENS} tokens in its prompts and what is recited"
    return ConfigError(f"{keys.where}: `streams.{name}` {rule}. Given: {given} and more")


def recite(
    rng: random.Random, prompt: Sequence[int], num_tokens: int, share: float, run: int, vocab_size: int
) -> list[int]:
    """An answer that repeats what stands before it, runs of it by turns with words of its own.

    Lengths of both are geometric, so that whatever has been repeated until now, it goes on with the same probability.

    Args:
        rng: Draws it.
        prompt: Tokens in front.
        num_tokens: Of the answer.
        share: Of these that are repeated.
        run: Mean tokens of what is repeated in a row.
        vocab_size: Ids lie below.
    """
    means = min(MOST, run * (1 - share) / share), run
    text, end = list(prompt), len(prompt) + num_tokens
    repeats = rng.random() < share
    while len(text) < end:
        count = min(_geometric(rng, means[repeats]), end - len(text))
        if repeats:
            start = rng.randrange(len(text))
            for index in range(start, start + count):  # what it has just said included
                text.append(text[index])
        else:
            text += rng.choices(range(3, vocab_size), k=count)
        repeats = not repeats
    return text[len(prompt) :]


def _geometric(rng: random.Random, mean: float) -> int:
    """0 or more."""
    return int(math.log(1.0 - rng.random()) / -math.log1p(1 / mean)) if mean > 0 else 0


def _poisson(rng: random.Random, rate: float, begins_s: float, burst_size: int) -> Iterator[float]:
    while True:
        begins_s += rng.expovariate(rate)
        yield begins_s


def _fixed(rng: random.Random, rate: float, begins_s: float, burst_size: int) -> Iterator[float]:
    return (begins_s + index / rate for index in itertools.count())


def _burst(rng: random.Random, rate: float, begins_s: float, burst_size: int) -> Iterator[float]:
    return (begins_s + index // burst_size * burst_size / rate for index in itertools.count())


ARRIVALS: Final = {"poisson": _poisson, "fixed": _fixed, "burst": _burst}
"""How requests come: independent of each other, evenly, or so many at once."""


def _lengths(value: Any) -> Draw:
    if not isinstance(value, dict):
        length = whole(1)(value)
        return lambda rng: length
    match sorted(value):
        case ["high", "low"]:
            low, high = whole(1)(value["low"]), whole(value["low"])(value["high"])
            return lambda rng: rng.randint(low, high)
        case ["median", "p99"]:
            median, p99 = number(1)(value["median"]), number(value["median"])(value["p99"])
            sigma = math.log(p99 / median) / NormalDist().inv_cdf(0.99)
            return lambda rng: min(MOST_WHOLE, max(1, round(median * math.exp(sigma * rng.gauss(0, 1)))))
        case ["values"] if isinstance(value["values"], dict):
            lengths = [whole(1)(each) for each in _plain_keys(value["values"])]
            weights = [number(0)(each) for each in value["values"].values()]
            if not sum(weights) > 0:
                raise ValueError
            return lambda rng: rng.choices(lengths, weights)[0]
    raise ValueError


def _share(value: Any) -> float:
    share = number()(value)
    if share > 1:
        raise ValueError
    return share


def _plain_keys(values: dict[Any, Any]) -> list[int]:
    """YAML's keys are text here."""
    return [int(key) for key in values]


def _tenants(value: Any) -> dict[str, float]:
    if isinstance(value, dict) and value:
        return {text(name): number(0, above=True)(weight) for name, weight in value.items()}
    return {f"tenant-{index}": 1.0 for index in range(whole(1, MAX_TENANTS)(value))}
