"""The search space: keys of the configuration, each with the values that the tuner tries."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving.errors import ConfigError, shorten

from llm_serving_simulator.profile import MeasuredRange, Profile
from llm_serving_simulator.tuner.objective import Figure, TuningObjective
from llm_serving_simulator.workload import Workload

Changes = Mapping[str, Any]
"""Changed values by key."""
Values = tuple[Any, ...]

SERVER_VALUES: Final[Mapping[str, Values]] = {
    "model_config.decode_batch_size": (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    "model_config.prefill_batch_size": (None, 1, 2, 4, 8, 16),
    "scheduler_config.max_prefill_tokens": (64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096),
    "scheduler_config.max_long_prefill_tokens": (None, 32, 64, 128, 256, 512, 1024),
    "scheduler_config.max_consecutive_prefill_steps": (1, 2, 4, 8, 16),
    "scheduler_config.max_consecutive_decode_steps": (1, 2, 4, 8, 16, 32, 64),
    "scheduler_config.policy": ("prefill_first", "decode_first", "mixed", "throughput"),
    "scheduler_config.order": (None, "arrival", "shortest", "deadline"),
    "scheduler_config.max_overtakes": (0, 4, 16, 64, 256),
    "scheduler_config.quantum_steps": (8, 16, 32, 64, 128, 256),
    "scheduler_config.prefix_caching": (True, False),
}
"""Ascending values where they have an order; the configuration's own value is added if it is missing."""
REFUSAL_VALUES: Final[Mapping[str, Values]] = {
    "scheduler_config.max_waiting_queue": (8, 16, 32, 64, 128, 256, 512, 1000, 2000),
    "scheduler_config.slo_refusal_factor": (None, 1.0, 1.5, 2.0, 4.0),
}
"""Keys that make the server refuse requests. They are tuned only if the objective counts refused requests, because
latencies are those of answered requests."""
COUNTING_FIGURES: Final = ("refused", "answered", "goodput_per_s", "goodput_share")
"""Figures that a refused request makes worse."""
CLASS_VALUES: Final[Mapping[str, Values]] = {
    "weight": (1, 2, 4, 8, 16, 32),
    "ageing_steps": (16, 64, 256, 1024, 4096),
    "max_running_share": (0.25, 0.5, 0.75, 0.9, 1.0),
    "max_kv_share": (0.25, 0.5, 0.75, 0.9, 1.0),
}
"""Keys of each class in the workload, if there are several."""
TENANT_VALUES: Final[Mapping[str, Values]] = {
    "scheduler_config.max_running_per_tenant": (None, 2, 4, 8, 16, 32, 64),
}
"""Keys that are tuned if there are several tenants."""
SPECULATION_VALUES: Final[Mapping[str, Values]] = {
    "scheduler_config.speculative_method": ("ngram", "none"),
}
"""Keys that are tuned if answers of the workload are known and no draft model is configured."""
NUM_BLOCKS: Final = "pa_config.num_blocks"
BLOCK_FACTORS: Final = (0.25, 0.5, 0.75, 1.0)
"""Factors of the objective's `max_num_blocks`."""
RANGE_OF: Final = {
    "model_config.decode_batch_size": "rows",
    "scheduler_config.max_prefill_tokens": "tokens",
}
"""The quantity of a step that each key limits."""
UNBOUNDED: Final = MeasuredRange({})
NEIGHBOURS_FIRST: Final = (
    "model_config.decode_batch_size",
    "scheduler_config.policy",
    "scheduler_config.max_prefill_tokens",
    "scheduler_config.order",
    "scheduler_config.max_consecutive_prefill_steps",
    "model_config.prefill_batch_size",
)
"""Keys whose neighbouring values are tried before those of other keys."""


@dataclass(frozen=True)
class SearchParameter:
    """One key of the search space."""

    key: str
    values: Values
    current: int
    """Index of the configuration's own value."""
    ordered: bool
    """Whether adjacent values are similar."""

    @property
    def current_value(self) -> Any:
        return self.values[self.current]

    def is_extreme(self, value: Any) -> bool:
        """Whether the value is the first or last of an ordered parameter."""
        return self.ordered and value in (self.values[0], self.values[-1])


def search_space(
    config: ServingConfig,
    workload: Workload,
    objective: TuningObjective,
    num_blocks: int | None = None,
    measured: MeasuredRange = UNBOUNDED,
) -> tuple[SearchParameter, ...]:
    """Return the parameters that may matter to this workload, except those that the objective fixes.

    Values that allow larger steps than were measured are left out, unless the configuration has them.

    Args:
        config: The configuration to start from.
        workload: The requests.
        objective: The tuning objective.
        num_blocks: Blocks of the cache if the configuration leaves their number open.
        measured: Measured range of the profile.

    Raises:
        ConfigError: The objective fixes a key that is not tuned, or has fewer blocks than the configuration.
    """
    table = dict(_table(config, workload, objective, num_blocks))
    class_keys = [f"request_classes.{each.name}.{key}" for each in config.request_classes for key in CLASS_VALUES]
    known = [*SERVER_VALUES, *REFUSAL_VALUES, *TENANT_VALUES, *SPECULATION_VALUES, NUM_BLOCKS, *class_keys]
    for key in objective.fixed:
        if key not in known:
            (nearest,) = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            rule = f"must have keys that are tuned; the nearest one is `{nearest}`"
            raise ConfigError(f"{objective.where.get('fixed', 'the goal')}: `fixed` {rule}. Given: {shorten(key)}")
    return tuple(
        _parameter(key, measured_values(key, values, measured), _current(config, key, num_blocks))
        for key, values in table.items()
        if key not in objective.fixed
    )


def neighbours(config: ServingConfig, workload: Workload, profile: Profile) -> Iterator[tuple[SearchParameter, object]]:
    """Yield each parameter with the values next to the current one; without an order, with every other value."""
    objective = TuningObjective(Figure("", "goodput_per_s"), maximize=True)
    parameters = search_space(config, workload, objective, profile.blocks_of(config.pa.block_size))
    ranks = {key: rank for rank, key in enumerate(NEIGHBOURS_FIRST)}
    for each in sorted(parameters, key=lambda each: ranks.get(each.key, len(ranks))):
        adjacent = (each.current + 1, each.current - 1) if each.ordered else range(len(each.values))
        for index in adjacent:
            if 0 <= index < len(each.values) and index != each.current:
                yield each, each.values[index]


def largest_steps(config: ServingConfig) -> tuple[int, int]:
    """Return the most requests and the most tokens of a step that the search space or the configuration allows."""
    rows, tokens = (max(value_of(config, key), *SERVER_VALUES[key]) for key in RANGE_OF)
    return rows, tokens


def unmeasured_values(measured: MeasuredRange) -> Iterator[str]:
    """Yield a line for each key some of whose values are not tried, because their steps were not measured."""
    for key, quantity in RANGE_OF.items():
        values = [str(each) for each in SERVER_VALUES[key] if not measured.contains(quantity, each)]
        if values:
            most = f"steps of at most {measured.maxima[quantity]:,.0f} {quantity}"
            yield f"{key}: {', '.join(values)} are not tried: the profile has {most}"


def measured_values(key: str, values: Values, measured: MeasuredRange) -> Values:
    """Return the values that allow no larger steps than were measured."""
    quantity = RANGE_OF.get(key)
    return values if quantity is None else tuple(each for each in values if measured.contains(quantity, each))


def _table(
    config: ServingConfig, workload: Workload, objective: TuningObjective, num_blocks: int | None
) -> Iterator[tuple[str, Values]]:
    yield from SERVER_VALUES.items()
    figures = (objective.figure, *(each.figure for each in objective.constraints))
    if any(each.name in COUNTING_FIGURES for each in figures):
        yield from REFUSAL_VALUES.items()
    if workload.has_answer_texts and config.scheduler.speculative_method in ("none", "ngram"):
        yield from SPECULATION_VALUES.items()
    names = classes_in(config, workload)
    if len(names) > 1:
        for name in names:
            yield from ((f"request_classes.{name}.{key}", values) for key, values in CLASS_VALUES.items())
    if len(tenants_in(workload)) > 1:
        yield from TENANT_VALUES.items()
    if (most := objective.max_num_blocks) is not None:
        current = _current(config, NUM_BLOCKS, num_blocks)
        if current is not None and current > most:
            where = objective.where.get("max_num_blocks", "the goal")
            rule = f"must be at least the {current} blocks that the configuration has"
            raise ConfigError(f"{where}: `max_num_blocks` {rule}. Given: {most}")
        yield NUM_BLOCKS, tuple(max(1, round(factor * most)) for factor in BLOCK_FACTORS)


def classes_in(config: ServingConfig, workload: Workload) -> list[str]:
    """Return the names of the workload's request classes, in the order of the configuration."""
    ranks = [each.rank for each in config.request_classes]
    found = set()
    for stream in workload.streams:
        for priority in {each.priority_in(config.request_classes) for each in stream.requests}:
            found.add(max((rank for rank in ranks if rank <= priority), default=ranks[0]))
    return [each.name for each in config.request_classes if each.rank in found]


def tenants_in(workload: Workload) -> list[str]:
    """Return the names of the workload's tenants, sorted."""
    return sorted({each.tenant for stream in workload.streams for each in stream.requests})


def value_of(config: ServingConfig, key: str) -> Any:
    """Return the effective value of "section.key" or "request_classes.row.key"."""
    section, *names = key.split(".")
    if section == "request_classes":
        return getattr(next(each for each in config.request_classes if each.name == names[0]), names[1])
    return getattr(getattr(config, SECTIONS[section][0]), names[0])


def _parameter(key: str, values: Sequence[Any], current: Any) -> SearchParameter:
    ordered = not any(isinstance(each, str | bool) for each in values)
    if current not in values:
        values = [*values, current]
        if ordered:
            values.sort(key=lambda each: float("-inf") if each is None else each)
    return SearchParameter(key, tuple(values), list(values).index(current), ordered)


def _current(config: ServingConfig, key: str, num_blocks: int | None) -> Any:
    current = value_of(config, key)
    return num_blocks if key == NUM_BLOCKS and current is None else current


def as_overrides(changes: Changes) -> list[str]:
    return [f"{key}={yaml_text(value)}" for key, value in changes.items()]


def yaml_text(value: Any) -> str:
    """Return a parameter's value as it is written in YAML."""
    return "null" if value is None else str(value)
