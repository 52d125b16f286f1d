"""What hardware, model and server take for what: the file that `llm-serving profile` writes.

JSON, or YAML where a person writes one for hardware that is not at hand; then `measured` is false, and every output
says so with the source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping as AnyMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from llm_serving.config.yaml_reader import Located, read_yaml
from llm_serving.errors import ConfigError

from llm_serving_simulator.cost_model import QUANTITIES, CostModel, Piece
from llm_serving_simulator.document import KEYS_IN, Mapping, flag, number, one_of, text, whole
from llm_serving_simulator.out_file import write_out
from llm_serving_simulator.reach import QUANTITIES as WATCHED
from llm_serving_simulator.reach import Reach

FORMAT: Final = 1
IDLE_FOR_S: Final = 0.05
"""Who has had nothing to do for so long is idle."""


@dataclass(frozen=True)
class Profile:
    """Times in seconds."""

    name: str
    source: str
    """By which command on which machine it was measured, or where its figures were published."""
    measured: bool
    """False: of hardware that was not at hand."""
    step: CostModel
    """Of a WorkAgent, for one step; with pieces over `sent` and `read` where it shares its cores with the master."""
    form: CostModel = field(default_factory=CostModel)
    """Of the master, to decide on a step and to send it."""
    take: CostModel = field(default_factory=CostModel)
    """Of the master, to take the reply of a step and to pass its tokens on."""
    idle_s: float = 0.0
    """How much longer a step takes that an idle server is given, with what its tokens take longer to their clients."""
    wake_s: float = 0.0
    """Until the master forms a step for a request that comes while it has nothing to do."""
    latency_s: float = 0.0
    """A frame's way between master and WorkAgent, where the other end waits for it."""
    lead_s: float = 0.005
    """A WorkAgent that is asked to announces the end of a step so long before."""
    request_s: float = 0.0
    """Of the event loop, for one request until it is at the door."""
    token_s: float = 0.0
    """Of the event loop, for one token on its way to its client."""
    one_interpreter: bool = False
    """Whether what the master takes is CPU time of threads that share an interpreter; else it is what they took."""
    client_s: float = 0.0
    """From a client to the event loop, and back."""
    spread: tuple[float, ...] = ()
    """Quantiles, evenly spaced from 0 to 1, of measured over predicted seconds of a step; empty: there is no spread."""
    num_blocks: int | None = None
    """Of the KV cache, where the configuration leaves that to the WorkAgent."""
    block_size: int | None = None
    """Tokens of each of these; None: as many as in whatever is simulated."""
    measured_to: AnyMapping[str, float] = field(default_factory=dict)
    """Of rows, tokens, context and pairs of a step the largest that was measured; what is missing has no end."""
    notes: AnyMapping[str, Any] = field(default_factory=dict)
    """For people: machine, errors on held-out steps and the like."""

    @property
    def reach(self) -> Reach:
        return Reach(self.measured_to)

    def blocks_of(self, block_size: int) -> int | None:
        """Blocks of so many tokens that the same memory has room for; None: it is not known."""
        if self.num_blocks is None or self.block_size is None:
            return self.num_blocks
        return max(1, self.num_blocks * self.block_size // block_size)

    def __str__(self) -> str:
        mark = "" if self.measured else "NOT MEASURED HERE: "
        return f"{mark}{self.name} ({self.source})"


_PIECES: Final = {"step", "form", "take"}


def read_profile(path: Path) -> Profile:
    """Reads a profile.

    Raises:
        ConfigError: With file, line and rule.
    """
    root = read_yaml(path, KEYS_IN)
    document = Mapping(root)
    version = document.take("format", whole(1), f"must be {FORMAT}")
    if version != FORMAT:
        raise ConfigError(f"{document.where_of('format')}: `format` must be {FORMAT}. Given: {version}")

    def seconds(key: str, default: float = 0.0) -> float:
        return document.take(key, number(), "must be seconds >= 0", default)

    profile = Profile(
        name=document.take("name", text, "must be a text"),
        source=document.take("source", text, "must be a text: where its figures come from"),
        measured=document.take("measured", flag, "must be true or false"),
        step=_model(document, "step"),
        form=_model(document, "form"),
        take=_model(document, "take"),
        idle_s=seconds("idle_s"),
        wake_s=seconds("wake_s"),
        latency_s=seconds("latency_s"),
        lead_s=seconds("lead_s", 0.005),
        request_s=seconds("request_s"),
        token_s=seconds("token_s"),
        one_interpreter=document.take("one_interpreter", flag, "must be true or false", False),
        client_s=seconds("client_s"),
        spread=document.take("spread", _spread, "must be ascending factors > 0", ()),
        num_blocks=document.take("num_blocks", whole(1), "must be an integer >= 1", 0) or None,
        block_size=document.take("block_size", whole(1), "must be an integer >= 1", 0) or None,
        measured_to=_measured_to(document),
        notes=document.take("notes", dict, "must be a mapping", {}),
    )
    if not profile.step.pieces:
        raise ConfigError(f"{document.where_of('step')}: `step` must have at least one piece")
    document.end()
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Writes it as JSON.

    Raises:
        ConfigError: The file cannot be written.
    """
    fields = {"format": FORMAT, **asdict(profile)}
    for key in _PIECES:
        fields[key] = [_plain(piece) for piece in getattr(profile, key).pieces]
    write_out(path, json.dumps(fields, indent=1) + "\n")


def _plain(piece: Piece) -> dict[str, Any]:
    values = {"of": piece.of, "seconds": piece.seconds, "above": piece.above, "to": piece.to}
    return {key: value for key, value in values.items() if value is not None}


def _measured_to(document: Mapping) -> dict[str, float]:
    found = {}
    for name, located in document.rows("measured_to"):
        one = Mapping(Located({name: located}, located.where), "measured_to")
        if name not in WATCHED:
            raise ConfigError(f"{located.where}: `measured_to.{name}` must be one of {', '.join(WATCHED)}")
        found[name] = one.take(name, number(), "must be a number >= 0")
    return found


def _model(document: Mapping, key: str) -> CostModel:
    nothing: list[dict[str, Any]] = []
    pieces = document.take(key, _list_of_mappings, "must be a list of {of, seconds, above, to}", nothing)
    found = []
    for number_of, piece in enumerate(pieces):
        where = document.where_of(key)
        located = {name: Located(value, where) for name, value in piece.items()}
        one = Mapping(Located(located, where), f"{key}.{number_of}")
        above = one.take("above", number(), "must be a number >= 0", 0.0)
        to = one.take("to", number(above, above=True), f"must be a number > {above:g}", float("inf"))
        found.append(
            Piece(
                one.take("of", one_of(QUANTITIES), f"must be one of {', '.join(QUANTITIES)}"),
                one.take("seconds", number(), "must be seconds >= 0"),
                above,
                None if to == float("inf") else to,
            )
        )
        one.end()
    return CostModel(tuple(found))


def _list_of_mappings(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise TypeError
    if any(isinstance(inner, dict) for each in value for inner in each.values()):
        raise TypeError
    return value


def _spread(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise TypeError
    factors = tuple(number(0, above=True)(each) for each in value)
    if len(factors) == 1 or list(factors) != sorted(factors):
        raise ValueError
    return factors
