"""The tuning objective: figures with limits, and the one figure to maximize or minimize."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from llm_serving.config.yaml_reader import Located, read_yaml
from llm_serving.errors import ConfigError, shorten
from llm_serving.log import get_logger

from llm_serving_simulator.figures import GROUP_FIGURES, LESS_IS_BETTER, RENAMED, SERVER_FIGURES, SHARES, Figures
from llm_serving_simulator.files import REFERENCE, TooLargeError, YamlMapping, integer, number, text
from llm_serving_simulator.report import format_figure

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
    """Whether to maximize the figure; False: minimize it."""
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
        """Return a number that is higher for a better configuration.

        Below 0 a constraint is violated. From 0 to 1 all are met, and the baseline itself has 0.5.
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
    """Read an objective file; docs/guides/tuning.md lists its keys.

    Raises:
        ConfigError: With file, line and rule.
    """
    return parse_objective(read_yaml(path, REFERENCE))


def parse_objective(root: Located) -> TuningObjective:
    """Return the objective of a parsed file; see `read_objective`."""
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
    """Return the constraint `FIGURE=LIMIT`; `where` begins the text of an error.

    Raises:
        ConfigError: The text breaks a rule.
    """
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
