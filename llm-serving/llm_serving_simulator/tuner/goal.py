"""What somebody wants of a server: figures that must be kept, and the one of which there shall be most or least."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from llm_serving.config.yaml_reader import Located, read_yaml
from llm_serving.errors import ConfigError, shorten

from llm_serving_simulator.document import KEYS_IN, Mapping, TooLargeError, number, text, whole
from llm_serving_simulator.figures import LESS_IS_BETTER, OF_ALL, OF_GROUP, SHARES, Figures
from llm_serving_simulator.report import number as shown

SHORT: Final = {
    "output_tokens": "output_tokens_per_s",
    "goodput": "goodput_per_s",
    "ttft": "ttft_p99_ms",
    "latency": "latency_p99_ms",
    "guesses": "draft_tokens",
    "guesses_right": "accepted_draft_tokens",
}
"""Names by which people ask for figures; the last two are the old ones of renamed figures."""
MARGIN: Final = 0.1
MOST_EXCESS: Final = 100.0
FIGURE_RULE: Final = "must be FIGURE, CLASS.FIGURE or `tenant NAME.FIGURE`"


class Figure(NamedTuple):
    """One of `figures_of`."""

    group: str
    """A class, `tenant NAME`, or nothing for all."""
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
class Constraint:
    """`figure` is at most, or where more is better at least, `limit`."""

    figure: Figure
    limit: float
    margin: float = 0.0
    """Share of the limit by which a simulation must stay within it."""

    @property
    def aim(self) -> float:
        """The limit less the margin; of a share, less that part of what it leaves."""
        if self.figure.less_is_better:
            return self.limit * (1 - self.margin)
        if self.figure.name in SHARES:
            return self.limit + self.margin * (1 - self.limit)
        return self.limit * (1 + self.margin)

    def excess(self, figures: Figures) -> float:
        """By how much of itself the aim is missed, 0 where it is kept; 1 where nothing was measured."""
        value, aim = figures.get(self.figure.key, math.nan), self.aim
        if math.isnan(value):
            return 1.0
        missed = value - aim if self.figure.less_is_better else aim - value
        return min(MOST_EXCESS, max(0.0, missed) / (aim or 1.0))

    def kept(self, figures: Figures) -> bool:
        return self.excess(figures) == 0

    def __str__(self) -> str:
        word = "<=" if self.figure.less_is_better else ">="
        return f"{self.figure} {word} {shown(self.figure.key, self.limit)}"


@dataclass(frozen=True)
class Goal:
    objective: Figure
    most: bool
    """Whether there shall be most of the objective; False: least."""
    constraints: tuple[Constraint, ...] = ()
    fixed: tuple[str, ...] = ()
    """Keys of the configuration that stay as they are."""
    max_num_blocks: int | None = None
    """Blocks of the cache that there is memory for; None: as many as there are."""
    where: dict[str, str] = field(default_factory=dict, compare=False)
    """By figure, and for `fixed` and `max_num_blocks`, file and line."""

    def violation(self, figures: Figures) -> float:
        """Sum of what the constraints miss; 0 where all are kept."""
        return sum(each.excess(figures) for each in self.constraints)

    def score(self, figures: Figures, of_own: Figures) -> float:
        """More is better: below 0 with a constraint broken, otherwise from 0 to 1 by the objective.

        Args:
            figures: What came of a configuration.
            of_own: Of the configuration to begin with, which has 0.5 where it breaks no constraint.
        """
        if (violation := self.violation(figures)) > 0:
            return -violation
        value, own = (each.get(self.objective.key, math.nan) for each in (figures, of_own))
        if math.isnan(value):
            return 0.0
        own = own if own > 0 else 1.0
        return value / (value + own) if self.most else own / (value + own)

    def check_groups(self, classes: Iterable[str], tenants: Iterable[str]) -> None:
        """Raises ConfigError unless the load has the classes and tenants that are named."""
        known = [*classes, *(f"tenant {each}" for each in tenants if each)]
        for figure in (*(each.figure for each in self.constraints), self.objective):
            if figure.group and figure.group not in known:
                rule = "must be of a class or a tenant that the load has requests of"
                raise ConfigError(
                    f"{self.where.get(figure.key, 'the goal')}: `{figure}` {rule}: {', '.join(known) or 'none'}"
                )

    def __str__(self) -> str:
        wanted = f"{'most' if self.most else 'least'} {self.objective}"
        return f"{'; '.join(map(str, self.constraints))}; {wanted}" if self.constraints else wanted


def read_goal(path: Path) -> Goal:
    """Reads a goal file; docs/tuning.md has its keys.

    Raises:
        ConfigError: With file, line and rule.
    """
    return goal(read_yaml(path, KEYS_IN))


def goal(root: Located) -> Goal:
    """As `read_goal`, of what has been read."""
    document = Mapping(root)
    margin = document.take("margin", _share, "must be a number of at least 0 and below 1", MARGIN)
    constraints = []
    where: dict[str, str] = {}
    for name, located in document.rows("constraints"):
        figure = _figure(name, f"{located.where}: `constraints.{name}`")
        limit = _limit(figure, located.value, f"{located.where}: `constraints.{name}`")
        if figure.key in where:
            rule = f"must be another figure than those before it. Given: {figure}, as in {where[figure.key]}"
            raise ConfigError(f"{located.where}: `constraints.{name}` {rule}")
        constraints.append(Constraint(figure, limit, margin))
        where[figure.key] = located.where
    wanted = [each for each in ("most", "least") if each in document]
    if len(wanted) != 1:
        raise ConfigError(f"{document.where}: a goal must have either `most` or `least`: the figure that is wanted")
    named = document.take(wanted[0], text, "must be the name of a figure")
    objective = _figure(named, f"{document.where_of(wanted[0])}: `{wanted[0]}`")
    where.setdefault(objective.key, document.where_of(wanted[0]))
    if (wanted[0] == "most") == objective.less_is_better:
        other = "least" if wanted[0] == "most" else "most"
        place = document.where_of(wanted[0])
        raise ConfigError(f"{place}: `{wanted[0]}` must be a figure of which that is good; say `{other}: {named}`")
    nothing: tuple[str, ...] = ()
    fixed = document.take("fixed", _keys, "must be a list of keys such as scheduler_config.policy", nothing)
    blocks = document.take("max_num_blocks", whole(1), "must be an integer >= 1", 0) or None
    where |= {key: document.where_of(key) for key in ("fixed", "max_num_blocks")}
    document.end()
    return Goal(objective, wanted[0] == "most", tuple(constraints), fixed, blocks, where)


def constraint(written: str, where: str) -> Constraint:
    """Of `FIGURE=LIMIT`.

    Raises:
        ConfigError: With the rule.
    """
    name, equals, limit = written.partition("=")
    try:
        if not equals:
            raise ValueError
        value = float(limit)
    except ValueError:
        raise ConfigError(f"{where} must be FIGURE=LIMIT with a number >= 0. Given: {shorten(written)}") from None
    figure = _figure(name.strip(), where)
    return Constraint(figure, _limit(figure, value, f"{where}: `{name.strip()}`"))


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


def _figure(name: str, where: str) -> Figure:
    group, _, own = name.rpartition(".")
    own = SHORT.get(own, own)
    known: Sequence[str] = OF_GROUP if group else (*OF_GROUP, *OF_ALL)
    if own not in known:
        nearest = difflib.get_close_matches(own, [*known, *SHORT], n=1, cutoff=0.0)[0]
        raise ConfigError(f"{where} {FIGURE_RULE}; the nearest known figure is `{nearest}`. Given: {shorten(name)}")
    return Figure(group, own)


def _share(value: Any) -> float:
    share = number()(value)
    if share >= 1:
        raise ValueError
    return share


def _keys(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(text(each) for each in value)
