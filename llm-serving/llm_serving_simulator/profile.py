"""The profile: times of the hardware, the model and the server, and the cost model that predicts steps from them.

`llm-serving profile` writes JSON. YAML for hardware that is not available is written by hand; it has `measured: false`,
which every output repeats with the source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from llm_serving.config.yaml_reader import Located, read_yaml
from llm_serving.errors import ConfigError

from llm_serving_simulator.files import REFERENCE, YamlMapping, flag, integer, number, one_of, text, write_file


class StepShape(NamedTuple):
    """The quantities of one step that its duration depends on."""

    rows: int
    """Requests in the step."""
    tokens: int
    """New tokens of all rows."""
    samples: int
    """Sampled tokens."""
    context: int
    """Keys that attention reads: the context length of all rows, new tokens included."""
    pairs: int
    """Query-key pairs of rows with more than one new token."""
    moves: int
    """KV blocks copied, swapped out or swapped in."""
    sent: int = 0
    """Tokens of other steps that the event loop sends while the step runs."""
    read: float = 0
    """Requests that the event loop reads while the step runs."""

    @property
    def verifies_drafts(self) -> bool:
        """Whether the step samples more tokens than it has requests."""
        return self.samples > self.rows

    def with_master_work(self, sent: int, read: float) -> StepShape:
        """Return the step with other work of the master beside it."""
        return tuple.__new__(StepShape, (*self[:6], sent, read))  # twice as fast as the constructor


def shape_of_rows(
    query_lens: np.ndarray[tuple[int], np.dtype[np.int32]],
    num_computed: np.ndarray[tuple[int], np.dtype[np.int32]],
    num_samples: int,
    num_moves: int,
) -> StepShape:
    """Return the shape of a step with new tokens `query_lens` [B] of rows that have `num_computed` [B] tokens, both
    int32.
    """
    queries, before = query_lens.astype(np.int64), num_computed.astype(np.int64)
    tokens = int(queries.sum())
    pairs = (queries * before + queries * (queries + 1) // 2)[queries > 1].sum()
    return StepShape(len(queries), tokens, num_samples, int(before.sum()) + tokens, int(pairs), num_moves)


CONSTANT: Final = "step"
"""Quantity of the term that counts once a step."""
QUANTITIES: Final = (CONSTANT, *StepShape._fields)

_Plan = tuple[tuple[int, float, float, float], ...]
"""(index in `StepShape`, above, to, seconds) of each term."""
_NUM_ROW_QUANTITIES: Final = StepShape._fields.index("samples") + 1


@dataclass(frozen=True, slots=True)
class CostTerm:
    """`seconds` for each unit of the quantity `of` between `above` and `to`."""

    of: str
    seconds: float
    above: float = 0.0
    to: float | None = None
    """None: unbounded."""

    def __str__(self) -> str:
        if self.of == CONSTANT:
            return f"{1e6 * self.seconds:.4g} us a step"
        span = f" {self.above:g} to {self.to:g}" if self.to is not None else f" above {self.above:g}"
        return f"{1e6 * self.seconds:.4g} us for each of {self.of}{span if self.above or self.to is not None else ''}"


@dataclass(frozen=True)
class CostModel:
    """A sum of cost terms; without terms it is 0 s."""

    terms: tuple[CostTerm, ...] = ()
    _plan: _Plan = field(init=False, repr=False, compare=False, default=())
    """Terms over quantities that change with every step."""
    _row_plan: _Plan = field(init=False, repr=False, compare=False, default=())
    """Terms over rows, tokens and samples, of which consecutive steps share few values."""
    _constant: float = field(init=False, repr=False, compare=False, default=0.0)
    _cache: dict[tuple[float, ...], float] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Seconds of `_constant` and `_row_plan` by rows, tokens and samples."""

    def __post_init__(self) -> None:
        plan = [
            (StepShape._fields.index(each.of), each.above, float("inf") if each.to is None else each.to, each.seconds)
            for each in self.terms
            if each.of != CONSTANT
        ]
        object.__setattr__(self, "_plan", tuple(each for each in plan if each[0] >= _NUM_ROW_QUANTITIES))
        object.__setattr__(self, "_row_plan", tuple(each for each in plan if each[0] < _NUM_ROW_QUANTITIES))
        object.__setattr__(self, "_constant", sum(each.seconds for each in self.terms if each.of == CONSTANT))

    def seconds(self, shape: StepShape) -> float:
        key = shape[:_NUM_ROW_QUANTITIES]
        total = self._cache.get(key)
        if total is None:
            total = self._cache[key] = _sum(self._row_plan, shape, self._constant)
        return _sum(self._plan, shape, total) if self._plan else total


def _sum(plan: _Plan, shape: StepShape, total: float) -> float:
    for index, above, to, seconds in plan:
        amount = shape[index]
        if amount > above:
            total += seconds * ((amount if amount < to else to) - above)
    return total


def segments(of: str, ends: Sequence[float]) -> list[CostTerm]:
    """Return consecutive terms of one second a unit that end at `ends`; the last one is unbounded."""
    starts = [0.0, *ends]
    return [CostTerm(of, 1.0, start, end) for start, end in zip(starts, [*ends, None], strict=True)]


FORMAT: Final = 1
IDLE_AFTER_S: Final = 0.05
"""Time without work after which a server counts as idle."""
DEFAULT_LEAD_S: Final = 0.005

RANGE_QUANTITIES: Final = ("rows", "tokens", "context", "pairs")
"""Quantities of a step whose measured maxima the profile keeps."""
RANGE_TOLERANCE: Final = 1.1
"""Factor of the measured maximum up to which a step counts as measured."""
EXTRAPOLATED: Final = "BEYOND WHAT WAS MEASURED"
"""Start of every notice about steps that are larger than any measured step."""
NUM_AT_MAXIMUM: Final = 3
"""Steps that must have reached a maximum, so that one outlier does not set it."""
_RANGE_INDICES: Final = tuple(StepShape._fields.index(each) for each in RANGE_QUANTITIES)


@dataclass(frozen=True)
class MeasuredRange:
    """Measured maxima by quantity; a quantity without a maximum is unbounded."""

    maxima: Mapping[str, float]

    def contains(self, quantity: str, amount: float) -> bool:
        """Whether steps of this amount were measured."""
        return quantity not in self.maxima or amount <= RANGE_TOLERANCE * self.maxima[quantity]


def measured_maxima(shapes: Sequence[StepShape]) -> dict[str, float]:
    """Return for each quantity the amount that at least `NUM_AT_MAXIMUM` steps reached."""
    rank = min(NUM_AT_MAXIMUM, len(shapes))
    return {
        name: float(sorted(shape[index] for shape in shapes)[-rank])
        for name, index in zip(RANGE_QUANTITIES, _RANGE_INDICES, strict=True)
        if rank
    }


def extrapolation_notices(notices: Iterable[str]) -> str:
    """Return those of the notices that report extrapolated steps, joined."""
    return "; ".join(each for each in notices if each.startswith(EXTRAPOLATED))


class RangeMonitor:
    """Counts the steps of a simulation that lie outside the measured range."""

    def __init__(self, measured: MeasuredRange) -> None:
        self._measured = measured
        self.num_extrapolated = 0
        self._limits = [
            (index, name, RANGE_TOLERANCE * measured.maxima[name])
            for name, index in zip(RANGE_QUANTITIES, _RANGE_INDICES, strict=True)
            if name in measured.maxima
        ]
        self._largest: dict[str, float] = {}

    def check(self, shape: StepShape) -> None:
        is_outside = False
        for index, name, limit in self._limits:
            if shape[index] > limit:
                is_outside = True
                self._largest[name] = max(shape[index], self._largest.get(name, 0))
        self.num_extrapolated += is_outside

    def notices(self, num_steps: int) -> Iterator[str]:
        """Yield a notice if any of `num_steps` steps was outside the range."""
        if self.num_extrapolated:
            names = ", ".join(
                f"{name} up to {largest:,.0f} (measured: {self._measured.maxima[name]:,.0f})"
                for name, largest in self._largest.items()
            )
            share = self.num_extrapolated / max(1, num_steps)
            yield f"{EXTRAPOLATED}: {share:.1%} of its steps have {names}; their times are extrapolated"


@dataclass(frozen=True)
class Profile:
    """Costs in seconds; the attributes are the keys of the file, which docs/reference/file_formats.md describes."""

    name: str
    source: str
    """The command and machine of the measurement, or the publication of the figures."""
    measured: bool
    step: CostModel
    """Time of a WorkAgent for a step; with terms over `sent` and `read` where it shares its cores with the master."""
    form: CostModel = field(default_factory=CostModel)
    """Time of the master to schedule a step and send it."""
    take: CostModel = field(default_factory=CostModel)
    """Time of the master to process a reply and pass its tokens on."""
    idle_s: float = 0.0
    """Extra time of the first step after idleness, until its tokens reach the clients."""
    wake_s: float = 0.0
    """Time from an arrival until an idle master schedules a step."""
    latency_s: float = 0.0
    """Time of a frame between master and WorkAgent when the receiver waits for it."""
    lead_s: float = DEFAULT_LEAD_S
    """Time before the end of a step at which the WorkAgent announces it."""
    request_s: float = 0.0
    """Time of the event loop to read one request."""
    token_s: float = 0.0
    """Time of the event loop to send one token."""
    one_interpreter: bool = False
    """Whether the master's times are CPU times of threads that share an interpreter."""
    client_s: float = 0.0
    """Time between a client and the event loop, one way."""
    spread: tuple[float, ...] = ()
    """Evenly spaced quantiles of measured over predicted step time; empty: no spread."""
    num_blocks: int | None = None
    block_size: int | None = None
    """None: the block size of the simulated configuration."""
    measured_to: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Free text for people: machine, errors on held-out steps."""

    @property
    def measured_range(self) -> MeasuredRange:
        return MeasuredRange(self.measured_to)

    def blocks_of(self, block_size: int) -> int | None:
        """Return the number of blocks of this size in the profile's cache memory; None: unknown."""
        if self.num_blocks is None or self.block_size is None:
            return self.num_blocks
        return max(1, self.num_blocks * self.block_size // block_size)


_MODELS: Final = ("step", "form", "take")


def read_profile(path: Path) -> Profile:
    """Read a profile. ConfigError names file, line and rule."""
    keys = YamlMapping(read_yaml(path, REFERENCE))
    version = keys.read("format", integer(1), f"must be {FORMAT}")
    if version != FORMAT:
        raise ConfigError(f"{keys.where_of('format')}: `format` must be {FORMAT}. Given: {version}")

    def seconds(key: str, default: float = 0.0) -> float:
        return keys.read(key, number(), "must be seconds >= 0", default)

    profile = Profile(
        name=keys.read("name", text, "must be a text"),
        source=keys.read("source", text, "must be a text: where its figures come from"),
        measured=keys.read("measured", flag, "must be true or false"),
        step=_model(keys, "step"),
        form=_model(keys, "form"),
        take=_model(keys, "take"),
        idle_s=seconds("idle_s"),
        wake_s=seconds("wake_s"),
        latency_s=seconds("latency_s"),
        lead_s=seconds("lead_s", DEFAULT_LEAD_S),
        request_s=seconds("request_s"),
        token_s=seconds("token_s"),
        one_interpreter=keys.read("one_interpreter", flag, "must be true or false", False),
        client_s=seconds("client_s"),
        spread=keys.read("spread", _spread, "must be ascending factors > 0", ()),
        num_blocks=keys.read("num_blocks", integer(1), "must be an integer >= 1", 0) or None,
        block_size=keys.read("block_size", integer(1), "must be an integer >= 1", 0) or None,
        measured_to=_measured_to(keys),
        notes=keys.read("notes", dict, "must be a mapping", {}),
    )
    if not profile.step.terms:
        raise ConfigError(f"{keys.where_of('step')}: `step` must have at least one piece")
    keys.reject_unknown_keys()
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write the profile as JSON.

    Raises:
        ConfigError: The file cannot be written.
    """
    values = {"format": FORMAT, **asdict(profile)}
    for key in _MODELS:
        terms = [asdict(each) for each in getattr(profile, key).terms]
        values[key] = [{name: value for name, value in term.items() if value is not None} for term in terms]
    write_file(path, json.dumps(values, indent=1) + "\n")


def _measured_to(keys: YamlMapping) -> dict[str, float]:
    found = {}
    for name, located in keys.rows("measured_to"):
        if name not in RANGE_QUANTITIES:
            raise ConfigError(f"{located.where}: `measured_to.{name}` must be one of {', '.join(RANGE_QUANTITIES)}")
        row = YamlMapping(Located({name: located}, located.where), "measured_to")
        found[name] = row.read(name, number(), "must be a number >= 0")
    return found


def _model(keys: YamlMapping, key: str) -> CostModel:
    empty: list[dict[str, Any]] = []
    rows = keys.read(key, _list_of_mappings, "must be a list of {of, seconds, above, to}", empty)
    terms = []
    for index, row in enumerate(rows):
        where = keys.where_of(key)
        row_keys = YamlMapping(
            Located({name: Located(value, where) for name, value in row.items()}, where), f"{key}.{index}"
        )
        above = row_keys.read("above", number(), "must be a number >= 0", 0.0)
        to = row_keys.read("to", number(above, exclusive=True), f"must be a number > {above:g}", float("inf"))
        of = row_keys.read("of", one_of(QUANTITIES), f"must be one of {', '.join(QUANTITIES)}")
        seconds = row_keys.read("seconds", number(), "must be seconds >= 0")
        terms.append(CostTerm(of, seconds, above, None if to == float("inf") else to))
        row_keys.reject_unknown_keys()
    return CostModel(tuple(terms))


def _list_of_mappings(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise TypeError
    if any(isinstance(inner, dict) for each in value for inner in each.values()):
        raise TypeError
    return value


def _spread(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise TypeError
    factors = tuple(number(0, exclusive=True)(each) for each in value)
    if len(factors) == 1 or list(factors) != sorted(factors):
        raise ValueError
    return factors
