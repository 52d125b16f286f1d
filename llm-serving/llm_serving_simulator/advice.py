"""Advice: simulates the last minutes of a server under its configuration and under configurations near it.

    python -m llm_serving_simulator.advice

reads a question from standard input and writes the answer to standard output. The server runs it at the lowest
priority; its CPU time and memory are limited.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
from llm_serving.admission.admission_control import RefusedRequests
from llm_serving.config import ServingConfig, load_config
from llm_serving.config.reload import LOADED_FOR, RELOADABLE
from llm_serving.core.enums import PolicyName
from llm_serving.core.request_class import RequestClass
from llm_serving.errors import ConfigError, LLMServingError, RecordingError
from msgspec import Struct

from llm_serving_simulator.calibration import calibrate
from llm_serving_simulator.figures import LESS_IS_BETTER, Figures, SimulationResult, figures_of
from llm_serving_simulator.profile import Profile, extrapolation_notices
from llm_serving_simulator.recordings import REFUSED, read_recorded_files, read_timings
from llm_serving_simulator.report import format_figure
from llm_serving_simulator.simulation import Simulation, StopEarly
from llm_serving_simulator.tuner.problem import SearchParameter, as_overrides, neighbours, yaml_text
from llm_serving_simulator.workload import Workload

COMPARED: Final = (
    "goodput_share",
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
)
"""Figures of all requests that are compared."""
COMPARED_OF_CLASSES: Final = ("goodput_share", "ttft_p99_ms", "tpot_p99_ms")
MIN_DIFFERENCE: Final = 0.05
"""Minimum relative difference of a figure that is reported."""
BASELINE_SHARE: Final = 1 / 30
"""Fraction of the time budget for the server's own configuration. A longer workload is cut to its newest half."""
MIN_EXTRA_GAIN: Final = 0.02
"""Minimum gain over the previous value with which the search in a direction continues; see `_differences`."""
PATIENCE: Final = 1
"""Number of values without such a gain that the search in a direction skips."""
FEW_STEPS: Final = 0.01
"""Maximum share of extrapolated steps that is not reported."""
MIN_REQUESTS: Final = 20
POLICY: Final = "scheduler_config.policy"

LOWEST_PRIORITY: Final = 19
MAX_MEMORY_BYTES: Final = 4 * 2**30
READING_S: Final = 30.0
"""CPU seconds for reading recordings and calibrating, in addition to the budget for simulations."""

Configure = Callable[[Sequence[str]], ServingConfig]
"""(list of "section.key=value") -> the configuration with these changes. Raises ConfigError."""


class Difference(Struct):
    """A figure that another configuration changes, formatted."""

    figure: str
    was: str
    would_be: str


class Neighbour(Struct):
    """One key with another value, and the figures that it changes."""

    key: str
    was: str
    value: str
    source: str
    """Where the current value is set: file and line, or another origin."""
    line: str
    needs_restart: bool
    better: list[Difference]
    worse: list[Difference]
    beyond: str = ""
    """Notice about extrapolated steps."""

    @property
    def advised(self) -> bool:
        return bool(self.better) and not self.worse


class Advice(Struct):
    """The answer of the route `/v1/scheduler/advice`."""

    requests: int
    refused: int
    """Number of simulated requests that admission control had refused."""
    seconds: float
    """In which the simulated requests arrived."""
    step_error: float
    """Median relative error of held-out step times."""
    played: int
    """Number of other values that were simulated."""
    not_played: int
    """Number of neighbouring values for which the time did not suffice."""
    advised: list[Neighbour]
    """Changes that make no figure worse, highest gain first."""
    otherwise: list[Neighbour]
    """Changes that make some figures better and others worse, with a positive gain, highest first."""


def advise(configure: Configure, workload: Workload, profile: Profile, step_error: float, budget_s: float) -> Advice:
    """Simulate the workload under the configuration and as many of its neighbours as the time allows, and values beyond
    a better neighbour, as long as each brings more. Raise RecordingError if there are too few requests.
    """
    deadline = time.monotonic() + budget_s
    config = configure(())
    workload, baseline, took_s = _baseline(config, workload, profile, BASELINE_SHARE * budget_s)
    candidates = list(neighbours(config, workload, profile))
    found: list[tuple[float, Neighbour]] = []
    num_played = num_adjacent = 0
    for parameter, value in candidates:
        best: tuple[float, Neighbour] | None = None
        num_without_gain = 0
        for each in _onwards(parameter, value):
            if time.monotonic() + took_s > deadline:
                break
            num_played += 1
            num_adjacent += each == value
            try:
                changed = configure(as_overrides({parameter.key: each}))
            except ConfigError:  # the value is invalid beside another key
                break
            result = Simulation(changed, workload, profile).run(_until(deadline))
            if not result.complete:
                break
            gain, better, worse = _differences(baseline, figures_of(result))
            if not better or gain <= (0.0 if best is None else best[0] + MIN_EXTRA_GAIN):
                num_without_gain += 1
                if best is None or num_without_gain > PATIENCE:
                    break
                continue
            best = gain, _neighbour(config, parameter, each, better, worse, result)
        if best is not None:
            found.append(best)
    found.sort(key=lambda each: -each[0])
    requests = [each for stream in workload.streams for each in stream.requests]
    due = [each.due_s for each in requests]
    return Advice(
        requests=workload.num_requests,
        refused=sum(each.stream == REFUSED for each in requests),
        seconds=round(max(due) - min(due), 3),
        step_error=step_error,
        played=num_played,
        not_played=len(candidates) - num_adjacent,
        advised=[each for _, each in found if each.advised],
        otherwise=[each for _, each in found if not each.advised],
    )


def _onwards(parameter: SearchParameter, value: object) -> Iterator[object]:
    """Yield a neighbouring value. If the parameter is ordered, yield the values beyond it too."""
    yield value
    if parameter.ordered:
        index = parameter.values.index(value)
        beyond = parameter.values[index + 1 :]
        yield from beyond if index > parameter.current else reversed(parameter.values[:index])


def newest(workload: Workload, share: float) -> Workload:
    """Return the newest requests of each stream, the fraction `share` of them."""
    streams = tuple(
        replace(stream, requests=stream.requests[len(stream.requests) - math.ceil(share * len(stream.requests)) :])
        for stream in workload.streams
    )
    first = min(each.due_s for stream in streams for each in stream.requests)
    shifted = tuple(
        replace(stream, requests=[replace(each, due_s=each.due_s - first) for each in stream.requests])
        for stream in streams
    )
    return replace(workload, streams=shifted)


def _baseline(
    config: ServingConfig, workload: Workload, profile: Profile, max_s: float
) -> tuple[Workload, Figures, float]:
    """Simulate the server's own configuration. Return the newest part of the workload that fits into the time, its
    figures, and the time.
    """
    if workload.num_requests < MIN_REQUESTS:
        raise RecordingError(f"advice needs at least {MIN_REQUESTS} requests. Given: {workload.num_requests}")
    while True:
        start = time.monotonic()
        result = Simulation(config, workload, profile).run(_until(start + max_s))
        if result.complete:
            return workload, figures_of(result), time.monotonic() - start
        fewer = newest(workload, 0.5)
        if fewer.num_requests < MIN_REQUESTS:
            raise RecordingError(
                f"simulating the newest {workload.num_requests} requests takes more than {max_s:.3g} s"
            )
        workload = fewer


def _until(deadline: float) -> StopEarly:
    return lambda outcomes, now: time.monotonic() > deadline


def _differences(baseline: Figures, other: Figures) -> tuple[float, list[Difference], list[Difference]]:
    """Return the total gain, and the figures that are noticeably better and worse. The gain is the sum of log ratios:
    half the time counts as much as twice the throughput. Single classes are compared only if there are several.
    """
    one_class = sum(key.endswith(".requests") and not key.startswith("tenant ") for key in baseline) == 1
    gain = 0.0
    better: list[Difference] = []
    worse: list[Difference] = []
    for key, before in baseline.items():
        after = other.get(key, math.nan)
        if not _is_compared(key) or math.isnan(before) or math.isnan(after) or (one_class and "." in key):
            continue
        if abs(after - before) < MIN_DIFFERENCE * max(abs(before), 1e-9):
            continue
        ratio = math.log(max(after, 1e-3) / max(before, 1e-3))
        change = -ratio if key.rpartition(".")[2] in LESS_IS_BETTER else ratio
        gain += change
        difference = Difference(key, format_figure(key, before), format_figure(key, after))
        (better if change > 0 else worse).append(difference)
    return gain, better, worse


def _is_compared(key: str) -> bool:
    group, _, name = key.rpartition(".")
    return not group.startswith("tenant ") and name in (COMPARED_OF_CLASSES if group else COMPARED)


def _needs_restart(parameter: SearchParameter, value: Any) -> bool:
    """Return whether the server cannot reload the value. Limits for which WorkAgents were loaded can only be lowered,
    and `fcfs` has no classes.
    """
    if parameter.key in LOADED_FOR:
        return bool(value > parameter.current_value)
    if parameter.key == POLICY:
        return PolicyName.FCFS in (parameter.current_value, value)
    return not (parameter.key.startswith("request_classes.") or parameter.key in RELOADABLE)


def line_for(config: ServingConfig, key: str, value: object) -> str:
    """Return the YAML line that sets a key; it has all rows of a section of rows that the YAML does not have."""
    section, _, name = key.partition(".")
    row, _, name = name.rpartition(".")
    if not row:
        return f"{section}: {_flow_mapping({name: value})}"
    rows: dict[str, dict[str, object]] = {row: {name: value}}
    if config.sources.get(f"{section}.{row}.rank", "default") == "default":
        rows = {each.name: _non_default_keys(each) for each in config.request_classes}
        rows[row][name] = value
    return f"{section}: {_flow_mapping({each: _flow_mapping(values) for each, values in rows.items()})}"


def _flow_mapping(values: Mapping[str, object]) -> str:
    return f"{{{', '.join(f'{key}: {yaml_text(value)}' for key, value in values.items())}}}"


def _non_default_keys(row: RequestClass) -> dict[str, object]:
    values = dataclasses.asdict(row)
    return {each.name: values[each.name] for each in dataclasses.fields(row)[1:] if values[each.name] != each.default}


def _neighbour(
    config: ServingConfig,
    parameter: SearchParameter,
    value: object,
    better: list[Difference],
    worse: list[Difference],
    result: SimulationResult,
) -> Neighbour:
    many_extrapolated = result.num_extrapolated_steps > FEW_STEPS * result.num_steps
    return Neighbour(
        parameter.key,
        yaml_text(parameter.current_value),
        yaml_text(value),
        config.sources.get(parameter.key, "default"),
        line_for(config, parameter.key, value),
        _needs_restart(parameter, value),
        better,
        worse,
        extrapolation_notices(result.notices) if many_extrapolated else "",
    )


# --- the process ------------------------------------------------------------------------------------------------------


class AdviceQuestion(Struct):
    yaml: str
    """The complete current configuration."""
    sources: dict[str, str]
    """Where each of its values is set."""
    folder: str
    since: float
    """Time, in seconds on the monotonic clock, from which requests count."""
    budget_s: float
    """Seconds for all simulations."""
    refused: list[RefusedRequests] = []
    """Requests refused since then, which no recording has."""


class NoAdvice(Struct):
    """The answer in place of `Advice`."""

    error: str


def answer(question: AdviceQuestion) -> Advice:
    """Raise LLMServingError if the recording or the configuration cannot be used."""
    with tempfile.TemporaryDirectory(prefix="llm-serving-advice-") as folder:
        path = Path(folder) / "serving.yaml"
        path.write_text(question.yaml, encoding="utf-8")

        def configure(overrides: Sequence[str]) -> ServingConfig:
            return replace(load_config(path, overrides), sources=question.sources)

        files = _files(Path(question.folder), question.since)
        workload = read_recorded_files(files, "the last minutes", question.since, question.refused)
        calibration = calibrate(read_timings(files), name="recorded", source="this server's recording")
        error = calibration.step.median_error
        return advise(configure, workload, calibration.profile, error, question.budget_s)


def _files(folder: Path, since: float) -> list[Path]:
    """Return the recordings written since a monotonic time."""
    oldest = time.time() - (time.monotonic() - since)
    files = [file for file in sorted(folder.glob("*.rec")) if file.stat().st_mtime >= oldest]
    if not files:
        raise RecordingError("nothing was recorded in that time")
    return files


def main() -> int:
    os.nice(LOWEST_PRIORITY)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=AdviceQuestion)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    seconds = int(question.budget_s + READING_S)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    logging.disable(logging.CRITICAL)
    try:
        found: Advice | NoAdvice = answer(question)
    except LLMServingError as error:
        found = NoAdvice(str(error))
    except (OSError, MemoryError) as error:
        found = NoAdvice(f"the recording cannot be read: {error or 'it needs too much memory'}")
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return int(isinstance(found, NoAdvice))


if __name__ == "__main__":
    sys.exit(main())
