"""What a search may turn: keys of the configuration, each with the values it tries."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving.errors import ConfigError, shorten

from llm_serving_simulator.load import Load
from llm_serving_simulator.reach import Reach
from llm_serving_simulator.tuner.goal import Goal

Changes = Mapping[str, Any]
"""By key, a value other than that of the configuration to begin with."""

SERVER: Final[Mapping[str, tuple[Any, ...]]] = {
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
"""Values in ascending order, or without one; that of the configuration is added where it is missing."""
REFUSING: Final[Mapping[str, tuple[Any, ...]]] = {
    "scheduler_config.max_waiting_queue": (8, 16, 32, 64, 128, 256, 512, 1000, 2000),
    "scheduler_config.slo_refusal_factor": (None, 1.0, 1.5, 2.0, 4.0),
}
"""What has requests refused: only where the goal counts them, as latencies are those of answered requests."""
COUNTING: Final = ("refused", "answered", "goodput_per_s", "goodput_share")
"""Figures that are worse for a request that is refused."""
OF_CLASS: Final[Mapping[str, tuple[Any, ...]]] = {
    "weight": (1, 2, 4, 8, 16, 32),
    "ageing_steps": (16, 64, 256, 1024, 4096),
    "max_running_share": (0.25, 0.5, 0.75, 0.9, 1.0),
    "max_kv_share": (0.25, 0.5, 0.75, 0.9, 1.0),
}
"""Of each class that the load has requests of, where there are several."""
OF_TENANTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "scheduler_config.max_running_per_tenant": (None, 2, 4, 8, 16, 32, 64),
}
"""Where there are several."""
SPECULATION: Final[Mapping[str, tuple[Any, ...]]] = {
    "scheduler_config.speculative_method": ("ngram", "none"),
}
"""Where texts of the load are known, and no draft model is asked, which is not simulated."""
NUM_BLOCKS: Final = "pa_config.num_blocks"
REACHES: Final = {
    "model_config.decode_batch_size": "rows",
    "scheduler_config.max_prefill_tokens": "tokens",
}
"""What of a step each allows."""
EVERYTHING: Final = Reach({})
BLOCK_FACTORS: Final = (0.25, 0.5, 0.75, 1.0)
"""Of the most blocks that the goal allows."""


@dataclass(frozen=True)
class Knob:
    key: str
    values: tuple[Any, ...]
    own: int
    """Where among them that of the configuration to begin with is."""
    ordered: bool
    """Whether neighbours among the values are alike."""

    @property
    def own_value(self) -> Any:
        return self.values[self.own]

    def at_an_end(self, value: Any) -> bool:
        """Whether a search could not go on from this value in its direction."""
        return self.ordered and value in (self.values[0], self.values[-1])


def knobs_for(
    config: ServingConfig, load: Load, goal: Goal, num_blocks: int | None = None, reach: Reach = EVERYTHING
) -> tuple[Knob, ...]:
    """The knobs that may matter to this load, those left out that the goal fixes.

    Values that allow larger steps than were measured are left out, but for that of the configuration.

    Args:
        config: To begin with.
        load: What comes.
        goal: Names keys that stay.
        num_blocks: Of the cache where the configuration does not say.
        reach: Of the profile.

    Raises:
        ConfigError: The goal fixes a key that is no knob, or has memory for fewer blocks than there are.
    """
    table = dict(_table(config, load, goal, num_blocks))
    of_classes = [f"request_classes.{each.name}.{key}" for each in config.request_classes for key in OF_CLASS]
    known = [*SERVER, *REFUSING, *OF_TENANTS, *SPECULATION, NUM_BLOCKS, *of_classes]
    for key in goal.fixed:
        if key not in known:
            (nearest,) = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            rule = f"must have keys that are tuned; the nearest one is `{nearest}`"
            raise ConfigError(f"{goal.where.get('fixed', 'the goal')}: `fixed` {rule}. Given: {shorten(key)}")
    return tuple(
        _knob(key, within(key, values, reach), _own(config, key, num_blocks))
        for key, values in table.items()
        if key not in goal.fixed
    )


def largest_steps(config: ServingConfig) -> tuple[int, int]:
    """Most requests and most tokens of a step that a search may allow, or the configuration does."""
    rows, tokens = (max(value_of(config, key), *SERVER[key]) for key in REACHES)
    return rows, tokens


def left_out(reach: Reach) -> Iterator[str]:
    """In lines: the values of keys that are not tried, as nobody has measured the steps that they allow."""
    for key, quantity in REACHES.items():
        values = [str(each) for each in SERVER[key] if not reach.allows(quantity, each)]
        if values:
            most = f"steps of at most {reach.most[quantity]:,.0f} {quantity}"
            yield f"{key}: {', '.join(values)} are not tried: the profile has {most}"


def within(key: str, values: tuple[Any, ...], reach: Reach) -> tuple[Any, ...]:
    """Those that allow no larger steps than were measured."""
    quantity = REACHES.get(key)
    return values if quantity is None else tuple(each for each in values if reach.allows(quantity, each))


def _table(
    config: ServingConfig, load: Load, goal: Goal, num_blocks: int | None
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    yield from SERVER.items()
    if any(each.name in COUNTING for each in (goal.objective, *(each.figure for each in goal.constraints))):
        yield from REFUSING.items()
    if load.has_texts and config.scheduler.draft_model_path is None:
        yield from SPECULATION.items()
    names = classes_in(config, load)
    if len(names) > 1:
        for name in names:
            yield from ((f"request_classes.{name}.{key}", values) for key, values in OF_CLASS.items())
    if len(tenants_in(load)) > 1:
        yield from OF_TENANTS.items()
    if goal.max_num_blocks is not None:
        own = _own(config, NUM_BLOCKS, num_blocks)
        if own is not None and own > goal.max_num_blocks:
            rule = f"must be at least the {own} blocks that the configuration has"
            raise ConfigError(
                f"{goal.where.get('max_num_blocks', 'the goal')}: `max_num_blocks` {rule}. Given: {goal.max_num_blocks}"
            )
        yield NUM_BLOCKS, tuple(max(1, round(factor * goal.max_num_blocks)) for factor in BLOCK_FACTORS)


def classes_in(config: ServingConfig, load: Load) -> list[str]:
    """Names of the classes of its requests, the highest first."""
    ranks = [each.rank for each in config.request_classes]
    found = set()
    for stream in load.streams:
        for priority in {each.priority_in(config.request_classes) for each in stream.requests}:
            found.add(max((rank for rank in ranks if rank <= priority), default=ranks[0]))
    return [each.name for each in config.request_classes if each.rank in found]


def tenants_in(load: Load) -> list[str]:
    return sorted({each.tenant for stream in load.streams for each in stream.requests})


def value_of(config: ServingConfig, key: str) -> Any:
    """The effective value of "section.key" or "request_classes.row.key"."""
    section, *names = key.split(".")
    if section == "request_classes":
        return getattr(next(each for each in config.request_classes if each.name == names[0]), names[1])
    return getattr(getattr(config, SECTIONS[section][0]), names[0])


def _knob(key: str, values: Sequence[Any], own: Any) -> Knob:
    ordered = not any(isinstance(each, str | bool) for each in values)
    if own not in values:
        values = [*values, own]
        if ordered:
            values.sort(key=lambda each: float("-inf") if each is None else each)
    return Knob(key, tuple(values), list(values).index(own), ordered)


def _own(config: ServingConfig, key: str, num_blocks: int | None) -> Any:
    own = value_of(config, key)
    return num_blocks if key == NUM_BLOCKS and own is None else own


def as_overrides(changes: Changes) -> list[str]:
    """For `load_config`."""
    return [f"{key}={yaml_text(value)}" for key, value in changes.items()]


def yaml_text(value: Any) -> str:
    """A value of a knob as it is written."""
    return "null" if value is None else str(value)
