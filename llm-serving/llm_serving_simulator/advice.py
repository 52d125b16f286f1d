"""What a configuration a step away would have made of the last minutes of a server, as its recording has them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from llm_serving.config.reload import LOADED_FOR, RELOADABLE
from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import PolicyName
from llm_serving.core.request_class import RequestClass
from llm_serving.errors import ConfigError, RecordingError
from msgspec import Struct

from llm_serving_simulator.figures import LESS_IS_BETTER, Figures, figures_of
from llm_serving_simulator.load import Load
from llm_serving_simulator.outcome import Outcome
from llm_serving_simulator.profile import Profile
from llm_serving_simulator.reach import told_beyond
from llm_serving_simulator.recorded_load import REFUSED
from llm_serving_simulator.report import number
from llm_serving_simulator.simulation import Result, Simulation
from llm_serving_simulator.tuner.goal import Figure, Goal
from llm_serving_simulator.tuner.knobs import Knob, as_overrides, knobs_for, yaml_text

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
SHARE_OF_OWN: Final = 1 / 30
"""Of the time that there is, that the configuration itself may take; of a load that takes longer the newest half."""
FURTHER: Final = 0.02
"""By how much more the next value in a direction must bring for the search to go on there; see `_differences`."""
PATIENCE: Final = 1
"""Values that bring no more are passed over on the way to the next."""
FEW_STEPS: Final = 0.01
"""Share of the steps up to which nothing is told of those that are larger than any that were recorded."""
MIN_REQUESTS: Final = 20
POLICY: Final = "scheduler_config.policy"
FIRST: Final = (
    "model_config.decode_batch_size",
    POLICY,
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
    beyond: str = ""
    """Where steps would be larger than any that were recorded: up to which size, and which were."""

    @property
    def advised(self) -> bool:
        return bool(self.better) and not self.worse


class Advice(Struct):
    requests: int
    """That were played: those that came during the time looked at, or the newest of them."""
    refused: int
    """Of these, that were refused at the door."""
    seconds: float
    """That they came in."""
    step_error: float
    """Median error of the times of steps that were measured and not fitted, relative."""
    played: int
    """Other values of keys."""
    not_played: int
    """Values beside the own ones for which there was no time."""
    advised: list[Neighbour]
    """Better in something and worse in nothing, that with most gain first."""
    otherwise: list[Neighbour]
    """Better in something and worse in something else, but better in all; that with most gain first."""


def advise(configure: Configure, load: Load, profile: Profile, step_error: float, budget_s: float) -> Advice:
    """Plays the load under the configuration and under its neighbours, as many as there is time for.

    Where a neighbour is better, the values behind it are tried as well, as long as each brings more.

    Raises:
        RecordingError: There are too few requests.
    """
    ends = time.monotonic() + budget_s
    config = configure(())
    load, own, took_s = _played(config, load, profile, SHARE_OF_OWN * budget_s)
    tried = list(neighbours(config, load, profile))
    found: list[tuple[float, Neighbour]] = []
    num_played = num_beside = 0
    for knob, value in tried:
        best: tuple[float, Neighbour] | None = None
        num_in_vain = 0
        for each in _onwards(knob, value):
            if time.monotonic() + took_s > ends:
                break
            num_played += 1
            num_beside += each == value
            try:
                changed = configure(as_overrides({knob.key: each}))
            except ConfigError:  # it breaks a rule together with another key
                break
            result = Simulation(changed, load, profile).run(_until(ends))
            if not result.complete:
                break
            gain, better, worse = _differences(own, figures_of(result))
            if not better or gain <= (0.0 if best is None else best[0] + FURTHER):
                num_in_vain += 1
                if best is None or num_in_vain > PATIENCE:
                    break
                continue
            best = gain, _neighbour(config, knob, each, better, worse, result)
        if best is not None:
            found.append(best)
    found.sort(key=lambda each: -each[0])
    advised = [each for _, each in found if each.advised]
    otherwise = [each for _, each in found if not each.advised]
    asked = [each for stream in load.streams for each in stream.requests]
    due = [each.due_s for each in asked]
    seconds = round(max(due) - min(due), 3)
    num_refused = sum(each.stream == REFUSED for each in asked)
    counts = num_played, len(tried) - num_beside
    return Advice(load.num_requests, num_refused, seconds, step_error, *counts, advised, otherwise)


def _onwards(knob: Knob, value: object) -> Iterator[object]:
    """A value beside the own one, and where they have an order those behind it."""
    yield value
    if knob.ordered:
        place = knob.values.index(value)
        yield from knob.values[place + 1 :] if place > knob.own else reversed(knob.values[:place])


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
    knobs = knobs_for(config, load, goal, profile.blocks_of(config.pa.block_size))
    ranks = {key: place for place, key in enumerate(FIRST)}
    for knob in sorted(knobs, key=lambda each: ranks.get(each.key, len(ranks))):
        beside = (knob.own + 1, knob.own - 1) if knob.ordered else range(len(knob.values))
        for place in beside:
            if 0 <= place < len(knob.values) and place != knob.own:
                yield knob, knob.values[place]


def _played(config: ServingConfig, load: Load, profile: Profile, most_s: float) -> tuple[Load, Figures, float]:
    """The load, or as much of its newest part as can be played in so long, what came of it, and how long that took."""
    if load.num_requests < MIN_REQUESTS:
        raise RecordingError(f"advice wants at least {MIN_REQUESTS} requests. Given: {load.num_requests}")
    while True:
        began = time.monotonic()
        result = Simulation(config, load, profile).run(_until(began + most_s))
        if result.complete:
            return load, figures_of(result), time.monotonic() - began
        fewer = newest(load, 0.5)
        if fewer.num_requests < MIN_REQUESTS:
            raise RecordingError(f"to play the newest {load.num_requests} requests takes more than {most_s:.3g} s")
        load = fewer


def _until(ends: float) -> Callable[[Sequence[Outcome], float], bool]:
    """Gives up when it is so late."""
    return lambda outcomes, now: time.monotonic() > ends


def _differences(own: Figures, other: Figures) -> tuple[float, list[Difference], list[Difference]]:
    """(sum of what is gained), and what is better and worse by enough to be told.

    What is gained is the logarithm of the ratio: half the time counts as much as twice the tokens, and a tenth of the
    time of one figure outweighs three times that of another. Classes count where there are several.
    """
    one_class = sum(key.endswith(".requests") and not key.startswith("tenant ") for key in own) == 1
    gain = 0.0
    better: list[Difference] = []
    worse: list[Difference] = []
    for key, before in own.items():
        after = other.get(key, math.nan)
        if not _is_looked_at(key) or math.isnan(before) or math.isnan(after) or (one_class and "." in key):
            continue
        if abs(after - before) < WORTH * max(abs(before), 1e-9):
            continue
        ratio = math.log(max(after, 1e-3) / max(before, 1e-3))
        change = -ratio if key.rpartition(".")[2] in LESS_IS_BETTER else ratio
        gain += change
        (better if change > 0 else worse).append(Difference(key, number(key, before), number(key, after)))
    return gain, better, worse


def _is_looked_at(key: str) -> bool:
    group, _, name = key.rpartition(".")
    if group.startswith("tenant "):
        return False
    return name in LOOKED_AT if not group else name in ("goodput_share", "ttft_p99_ms", "tpot_p99_ms")


def _needs_restart(knob: Knob, value: Any) -> bool:
    """WorkAgents were loaded for what there was at the start, less of which is always possible; fcfs has no classes."""
    if knob.key in LOADED_FOR:
        return bool(value > knob.own_value)
    if knob.key == POLICY:
        return PolicyName.FCFS in (knob.own_value, value)
    return not (knob.key.startswith("request_classes.") or knob.key in RELOADABLE)


def line_for(config: ServingConfig, key: str, value: object) -> str:
    """What gives a key of the YAML this value; of a section with rows that the YAML has not, all rows."""
    section, _, name = key.partition(".")
    row, _, name = name.rpartition(".")
    if not row:
        return f"{section}: {_mapping({name: value})}"
    rows: dict[str, dict[str, object]] = {row: {name: value}}
    if config.sources.get(f"{section}.{row}.rank", "default") == "default":
        rows = {each.name: _given_of(each) for each in config.request_classes}
        rows[row][name] = value
    return f"{section}: {_mapping({each: _mapping(values) for each, values in rows.items()})}"


def _mapping(values: Mapping[str, object]) -> str:
    return f"{{{', '.join(f'{key}: {yaml_text(value)}' for key, value in values.items())}}}"


def _given_of(row: RequestClass) -> dict[str, object]:
    """Its keys that are other than a row has where they are not given."""
    values = dataclasses.asdict(row)
    return {each.name: values[each.name] for each in dataclasses.fields(row)[1:] if values[each.name] != each.default}


def _neighbour(
    config: ServingConfig,
    knob: Knob,
    value: object,
    better: list[Difference],
    worse: list[Difference],
    result: Result,
) -> Neighbour:
    tells_beyond = result.num_steps_beyond > FEW_STEPS * result.num_steps
    return Neighbour(
        knob.key,
        yaml_text(knob.own_value),
        yaml_text(value),
        config.sources.get(knob.key, "default"),
        line_for(config, knob.key, value),
        _needs_restart(knob, value),
        better,
        worse,
        told_beyond(result.notices) if tells_beyond else "",
    )
