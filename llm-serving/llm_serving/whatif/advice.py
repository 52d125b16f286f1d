"""What a configuration a step away would have made of the last minutes of a server, as its recording has them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from msgspec import Struct

from llm_serving.config.reload import LOADED_FOR, RELOADABLE
from llm_serving.config.schema import ServingConfig
from llm_serving.errors import ConfigError, RecordingError
from llm_serving.whatif.figures import LESS_IS_BETTER, Figures, figures_of
from llm_serving.whatif.load import Load
from llm_serving.whatif.outcome import Outcome
from llm_serving.whatif.profile import Profile
from llm_serving.whatif.report import number
from llm_serving.whatif.simulation import Simulation
from llm_serving.whatif.tuning.goal import Figure, Goal
from llm_serving.whatif.tuning.knobs import Knob, as_overrides, knobs_for, yaml_text

LOOKED_AT: Final = (
    "goodput_share",
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
)
"""Figures of all requests; of each class the shares and the 99th percentiles."""
WORTH: Final = 0.05
"""Share by which a figure must differ to be told."""
SHARE_OF_OWN: Final = 0.25
"""Of the time that there is, that the configuration itself may take; of a load that takes longer the newest half."""
MIN_REQUESTS: Final = 20
FIRST: Final = (
    "scheduler_config.policy",
    "model_config.decode_batch_size",
    "scheduler_config.max_prefill_tokens",
    "scheduler_config.order",
    "scheduler_config.max_consecutive_prefill_steps",
    "model_config.prefill_batch_size",
)
"""Keys whose neighbours are played first."""

Configure = Callable[[Sequence[str]], ServingConfig]
"""The configuration with "section.key=value" each; raises ConfigError."""


class Difference(Struct):
    figure: str
    was: str
    would_be: str


class Neighbour(Struct):
    """One key with another value, and what it would have brought."""

    key: str
    was: str
    value: str
    source: str
    """Where the value that it has is written: "file:line", "default", .."""
    line: str
    """For the YAML."""
    needs_restart: bool
    """Whether `llm-serving reload` does not take it over."""
    better: list[Difference]
    worse: list[Difference]

    @property
    def advised(self) -> bool:
        return bool(self.better) and not self.worse


class Advice(Struct):
    requests: int
    """That were played: those let in during the time looked at, or the newest of them."""
    seconds: float
    """That they came in."""
    step_error: float
    """Median error of the times of steps that were measured and not fitted, relative."""
    played: int
    """Neighbours."""
    not_played: int
    """Those for which there was no time."""
    advised: list[Neighbour]
    """Better in something and worse in nothing, that with most gain first."""
    otherwise: list[Neighbour]
    """Better in something and worse in something else."""


def advise(configure: Configure, load: Load, profile: Profile, step_error: float, budget_s: float) -> Advice:
    """Plays the load under the configuration and under its neighbours, as many as there is time for.

    Raises:
        RecordingError: There are too few requests.
    """
    ends = time.monotonic() + budget_s
    config = configure(())
    load, own, took_s = _played(config, load, profile, SHARE_OF_OWN * budget_s)
    tried = list(neighbours(config, load, profile))
    found: list[tuple[float, Neighbour]] = []
    num_played = 0
    for knob, value in tried:
        if time.monotonic() + took_s > ends:
            break
        num_played += 1
        try:
            changed = configure(as_overrides({knob.key: value}))
        except ConfigError:  # it breaks a rule together with another key
            continue
        result = Simulation(changed, load, profile).run(_until(ends))
        if result.complete:
            gain, better, worse = _differences(own, figures_of(result))
            if better:
                found.append((gain, _neighbour(config, knob, value, better, worse)))
    found.sort(key=lambda each: -each[0])
    advised = [each for _, each in found if each.advised]
    otherwise = [each for _, each in found if not each.advised]
    due = [each.due_s for stream in load.streams for each in stream.requests]
    seconds = round(max(due) - min(due), 3)
    return Advice(load.num_requests, seconds, step_error, num_played, len(tried) - num_played, advised, otherwise)


def newest(load: Load, share: float) -> Load:
    """The newest requests of each stream."""
    streams = tuple(
        replace(stream, requests=stream.requests[len(stream.requests) - math.ceil(share * len(stream.requests)) :])
        for stream in load.streams
    )
    first = min(each.due_s for stream in streams for each in stream.requests)
    moved = tuple(
        replace(stream, requests=[replace(each, due_s=each.due_s - first) for each in stream.requests])
        for stream in streams
    )
    return replace(load, streams=moved)


def neighbours(config: ServingConfig, load: Load, profile: Profile) -> Iterator[tuple[Knob, object]]:
    """Each key of `tune` with the values beside its own, or with any other where they have no order."""
    goal = Goal(Figure("", "goodput_per_s"), most=True)
    knobs = knobs_for(config, load, goal, profile.num_blocks)
    ranks = {key: place for place, key in enumerate(FIRST)}
    for knob in sorted(knobs, key=lambda each: ranks.get(each.key, len(ranks))):
        beside = (knob.own + 1, knob.own - 1) if knob.ordered else range(len(knob.values))
        for place in beside:
            if 0 <= place < len(knob.values) and place != knob.own:
                yield knob, knob.values[place]


def _played(config: ServingConfig, load: Load, profile: Profile, most_s: float) -> tuple[Load, Figures, float]:
    """The load, or as much of its newest part as can be played in so long, what came of it, and how long that took."""
    while True:
        if load.num_requests < MIN_REQUESTS:
            raise RecordingError(f"advice wants at least {MIN_REQUESTS} requests. Given: {load.num_requests}")
        began = time.monotonic()
        result = Simulation(config, load, profile).run(_until(began + most_s))
        if result.complete:
            return load, figures_of(result), time.monotonic() - began
        load = newest(load, 0.5)


def _until(ends: float) -> Callable[[Sequence[Outcome], float], bool]:
    """Gives up when it is so late."""
    return lambda outcomes, now: time.monotonic() > ends


def _differences(own: Figures, other: Figures) -> tuple[float, list[Difference], list[Difference]]:
    """(sum of what is better, as shares), and what is better and worse by enough to be told."""
    gain = 0.0
    better: list[Difference] = []
    worse: list[Difference] = []
    for key, before in own.items():
        after = other.get(key, math.nan)
        if not _is_looked_at(key) or math.isnan(before) or math.isnan(after):
            continue
        change = (after - before) / max(abs(before), 1e-9)
        if key.rpartition(".")[2] in LESS_IS_BETTER:
            change = (before - after) / max(abs(before), 1e-9)
        if abs(change) >= WORTH:
            gain += min(change, 1.0)
            (better if change > 0 else worse).append(Difference(key, number(key, before), number(key, after)))
    return gain, better, worse


def _is_looked_at(key: str) -> bool:
    group, _, name = key.rpartition(".")
    if group.startswith("tenant "):
        return False
    return name in LOOKED_AT if not group else name in ("goodput_share", "ttft_p99_ms", "tpot_p99_ms")


def _needs_restart(knob: Knob, value: Any) -> bool:
    """WorkAgents were loaded for what there was at the start: less of that is always possible."""
    if knob.key in LOADED_FOR:
        return bool(value > knob.own_value)
    return not (knob.key.startswith("request_classes.") or knob.key in RELOADABLE)


def _neighbour(
    config: ServingConfig, knob: Knob, value: object, better: list[Difference], worse: list[Difference]
) -> Neighbour:
    section, _, key = knob.key.partition(".")
    row, _, name = key.rpartition(".")
    line = (
        f"{section}: {{{row}: {{{name}: {yaml_text(value)}}}}}" if row else f"{section}: {{{key}: {yaml_text(value)}}}"
    )
    return Neighbour(
        knob.key,
        yaml_text(knob.own_value),
        yaml_text(value),
        config.sources.get(knob.key, "default"),
        line,
        _needs_restart(knob, value),
        better,
        worse,
    )
