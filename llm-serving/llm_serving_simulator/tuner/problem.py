"""The problem that the tuner solves: the objective, and the keys of the configuration with the values that it tries."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving.config.yaml_reader import Located, read_yaml
from llm_serving.errors import ConfigError, shorten
from llm_serving.log import get_logger

from llm_serving_simulator.figures import GROUP_FIGURES, LESS_IS_BETTER, RENAMED, SERVER_FIGURES, SHARES, Figures
from llm_serving_simulator.files import REFERENCE, TooLargeError, YamlMapping, integer, number, text
from llm_serving_simulator.profile import MeasuredRange, Profile
from llm_serving_simulator.report import format_figure
from llm_serving_simulator.workload import Workload

logger = get_logger(__name__)

ALIASES: Final = {
    "output_tokens": "output_tokens_per_s",
    "goodput": "goodput_per_s",
    "ttft": "ttft_p99_ms",
    "latency": "latency_p99_ms",
}
"""Short names of figures."""
DEFAULT_MARGIN: Final = 0.1
MAX_EXCESS: Final = 100.0
FIGURE_RULE: Final = "must be FIGURE, CLASS.FIGURE or `tenant NAME.FIGURE`"


class Figure(NamedTuple):
    """The name of a figure of `figures_of`."""

    group: str
    """A class, `tenant NAME`, or empty for all requests."""
    name: str

    @property
    def key(self) -> str:
        return f"{self.group}.{self.name}" if self.group else self.name

    @property
    def less_is_better(self) -> bool:
        return self.name in LESS_IS_BETTER

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True)
class FigureConstraint:
    """A limit of a figure: its maximum, or its minimum where more is better."""

    figure: Figure
    limit: float
    margin: float = 0.0
    """Share of the limit by which a simulation must stay within it."""

    @property
    def target(self) -> float:
        """The limit with its margin; for a share, the margin is part of the distance to 1."""
        if self.figure.less_is_better:
            return self.limit * (1 - self.margin)
        if self.figure.name in SHARES:
            return self.limit + self.margin * (1 - self.limit)
        return self.limit * (1 + self.margin)

    def excess(self, figures: Figures) -> float:
        """Return by which share of the target it is missed: 0 if it is met, 1 if nothing was measured."""
        value, target = figures.get(self.figure.key, math.nan), self.target
        if math.isnan(value):
            return 1.0
        missed = value - target if self.figure.less_is_better else target - value
        return min(MAX_EXCESS, max(0.0, missed) / (target or 1.0))

    def is_met(self, figures: Figures) -> bool:
        return self.excess(figures) == 0

    def __str__(self) -> str:
        word = "<=" if self.figure.less_is_better else ">="
        return f"{self.figure} {word} {format_figure(self.figure.key, self.limit)}"


@dataclass(frozen=True)
class TuningObjective:
    """The content of an objective file."""

    figure: Figure
    maximize: bool
    """False: minimize it."""
    constraints: tuple[FigureConstraint, ...] = ()
    fixed: tuple[str, ...] = ()
    """Keys of the configuration that are not tuned."""
    max_num_blocks: int | None = None
    """Blocks that there is memory for; None: the number of blocks is not tuned."""
    where: dict[str, str] = field(default_factory=dict, compare=False)
    """File and line by figure, and of `fixed` and `max_num_blocks`."""

    def violation(self, figures: Figures) -> float:
        """Return the sum of all excesses; 0 if every constraint is met."""
        return sum(each.excess(figures) for each in self.constraints)

    def score(self, figures: Figures, baseline: Figures) -> float:
        """Return a number that is higher for a better configuration: below 0 a constraint is violated, and the baseline
        has 0.5.
        """
        if (violation := self.violation(figures)) > 0:
            return -violation
        value, base = (each.get(self.figure.key, math.nan) for each in (figures, baseline))
        if math.isnan(value):
            return 0.0
        base = base if base > 0 else 1.0
        return value / (value + base) if self.maximize else base / (value + base)

    def check_groups(self, classes: Iterable[str], tenants: Iterable[str]) -> None:
        """Raise ConfigError if a figure names a class or a tenant that no request of the workload has."""
        known = [*classes, *(f"tenant {each}" for each in tenants if each)]
        for figure in (*(each.figure for each in self.constraints), self.figure):
            if figure.group and figure.group not in known:
                where = self.where.get(figure.key, "the goal")
                rule = "must be of a class or a tenant that the load has requests of"
                raise ConfigError(f"{where}: `{figure}` {rule}: {', '.join(known) or 'none'}")

    def __str__(self) -> str:
        aim = f"{'most' if self.maximize else 'least'} {self.figure}"
        return f"{'; '.join(map(str, self.constraints))}; {aim}" if self.constraints else aim


def read_objective(path: Path) -> TuningObjective:
    """Read an objective file (docs/guides/tuning.md). ConfigError names file, line and rule."""
    return parse_objective(read_yaml(path, REFERENCE))


def parse_objective(root: Located) -> TuningObjective:
    keys = YamlMapping(root)
    margin = keys.read("margin", _margin, "must be a number of at least 0 and below 1", DEFAULT_MARGIN)
    constraints = []
    where: dict[str, str] = {}
    for name, located in keys.rows("constraints"):
        prefix = f"{located.where}: `constraints.{name}`"
        figure = _figure(name, prefix)
        limit = _limit(figure, located.value, prefix)
        if figure.key in where:
            given = f"{figure}, as in {where[figure.key]}"
            raise ConfigError(f"{prefix} must be another figure than those before it. Given: {given}")
        constraints.append(FigureConstraint(figure, limit, margin))
        where[figure.key] = located.where
    directions = [each for each in ("most", "least") if each in keys]
    if len(directions) != 1:
        raise ConfigError(f"{keys.where}: a goal must have either `most` or `least`: the figure that is wanted")
    (direction,) = directions
    name = keys.read(direction, text, "must be the name of a figure")
    figure = _figure(name, f"{keys.where_of(direction)}: `{direction}`")
    where.setdefault(figure.key, keys.where_of(direction))
    if (direction == "most") == figure.less_is_better:
        other = "least" if direction == "most" else "most"
        rule = f"must be a figure of which that is good; say `{other}: {name}`"
        raise ConfigError(f"{keys.where_of(direction)}: `{direction}` {rule}")
    no_keys: tuple[str, ...] = ()
    fixed = keys.read("fixed", _keys, "must be a list of keys such as scheduler_config.policy", no_keys)
    blocks = keys.read("max_num_blocks", integer(1), "must be an integer >= 1", 0) or None
    where |= {key: keys.where_of(key) for key in ("fixed", "max_num_blocks")}
    keys.reject_unknown_keys()
    return TuningObjective(figure, direction == "most", tuple(constraints), fixed, blocks, where)


def parse_constraint(written: str, where: str) -> FigureConstraint:
    """Return the constraint `FIGURE=LIMIT`; `where` begins the text of a ConfigError."""
    name, equals, limit = written.partition("=")
    try:
        if not equals:
            raise ValueError
        value = float(limit)
    except ValueError:
        raise ConfigError(f"{where} must be FIGURE=LIMIT with a number >= 0. Given: {shorten(written)}") from None
    figure = _figure(name.strip(), where)
    return FigureConstraint(figure, _limit(figure, value, f"{where}: `{name.strip()}`"))


def _limit(figure: Figure, value: Any, where: str) -> float:
    try:
        limit = number()(value)
    except TooLargeError as error:
        raise ConfigError(f"{where} must be at most {error}. Given: {shorten(value)}") from None
    except (TypeError, ValueError):
        raise ConfigError(f"{where} must be a number >= 0. Given: {shorten(value)}") from None
    if figure.name in SHARES and limit > 1:
        raise ConfigError(f"{where} must be a share of at most 1. Given: {limit:g}")
    return limit


def _figure(written: str, where: str) -> Figure:
    group, _, name = written.rpartition(".")
    if name in RENAMED:
        logger.warning("the figure %s is renamed to %s; the old name works for one release", name, RENAMED[name])
    name = ALIASES.get(name, RENAMED.get(name, name))
    known = GROUP_FIGURES if group else (*GROUP_FIGURES, *SERVER_FIGURES)
    if name not in known:
        nearest = difflib.get_close_matches(name, [*known, *ALIASES], n=1, cutoff=0.0)[0]
        raise ConfigError(f"{where} {FIGURE_RULE}; the nearest known figure is `{nearest}`. Given: {shorten(written)}")
    return Figure(group, name)


def _margin(value: Any) -> float:
    margin = number()(value)
    if margin >= 1:
        raise ValueError
    return margin


def _keys(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(text(each) for each in value)


Changes = Mapping[str, Any]
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
"""Keys that make the server refuse requests, tuned only if the objective counts them: latencies are those of answered
ones."""
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
        return self.ordered and value in (self.values[0], self.values[-1])


def search_space(
    config: ServingConfig,
    workload: Workload,
    objective: TuningObjective,
    num_blocks: int | None = None,
    measured: MeasuredRange = UNBOUNDED,
) -> tuple[SearchParameter, ...]:
    """Return the parameters that may matter to this workload, except those that the objective fixes.

    Larger steps than those of `measured` are left out, unless the configuration has them. `num_blocks`: blocks of the
    cache if the configuration leaves their number open. Raise ConfigError if the objective fixes a key that is not
    tuned, or has fewer blocks than the configuration.
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
    return "null" if value is None else str(value)
