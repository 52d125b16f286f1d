"""The declaration of one YAML key: its default, the values it accepts, and how an error states the rule."""

import difflib
import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llm_serving.config.paths import Kind
from llm_serving.errors import ConfigError, shorten
from llm_serving.hub import is_revision

MEMORY_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MAX_INTEGER: Final = 2**31 - 1
MAX_TIMEOUT_S: Final = 10**6
"""Maximum timeout in seconds. A larger one overflows operating-system timers, which count milliseconds in 31 bits."""
MAX_ITEMS: Final = 1024
_NUMBER_WITH_EXPONENT: Final = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
"""YAML 1.1 reads some numbers in this form as text, such as 1e-9 and 1.0e6."""


@dataclass(frozen=True)
class Rule:
    text: str
    """The rule as an error states it after the key: "must be an integer >= 1"."""
    parse: Callable[[Any], Any]
    """Convert a plain YAML value into a typed one. Raise ValueError if the value breaks the rule."""
    shows_value: bool = True
    """False for keys where a user may paste a secret by mistake."""
    kind: Kind | None = None
    """For a path: what must exist there. The loader checks it after resolving the path."""

    def broken_by(self, value: Any) -> str:
        return f"{self.text}. Given: {shorten(value)}" if self.shows_value else self.text

    def value_of(self, what: str, value: Any, where: str) -> Any:
        """Return the typed value of a key or a name. Raise ConfigError, with `where`, if `value` breaks the rule."""
        try:
            return self.parse(value)
        except ValueError:
            raise ConfigError(f"{where}: {what} {self.broken_by(value)}") from None


def nearest(name: str, known: Sequence[str]) -> str:
    return f"the nearest known one is `{difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]}`"


@dataclass(frozen=True)
class Option:
    rule: Rule
    expert: bool = False
    reloadable: bool = False
    derived: bool = False
    """Whether the loader computes a missing value from other keys or from the model."""
    only_with: tuple[str, Any] | None = None
    """(other key, its value) that must be set if this key differs from its default; `...` means any value but null."""


def option(default: Any, rule: Rule, **traits: Any) -> Any:
    """Declare a dataclass field as a key of the YAML. `traits` are the fields of `Option`."""
    return field(default=default, metadata={"option": Option(rule, **traits)})


def _rule(text: str, holds: Callable[[Any], Any], convert: Callable[[Any], Any], **settings: Any) -> Rule:
    def parse(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return convert(value)

    return Rule(text, parse, **settings)


# --- numbers --------------------------------------------------------------------------------------------------------


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(minimum: int, maximum: int = MAX_INTEGER) -> Rule:
    upper = "" if maximum == MAX_INTEGER else f" and <= {maximum}"
    return _rule(
        f"must be an integer >= {minimum}{upper}", lambda value: _is_integer(value) and minimum <= value <= maximum, int
    )


def one_of(numbers: Sequence[int]) -> Rule:
    text = f"must be {' or '.join(map(str, numbers))}"
    return _rule(text, lambda value: _is_integer(value) and value in numbers, int)


def integers(minimum: int, maximum: int = MAX_INTEGER, unique: bool = False) -> Rule:
    """Return the rule of a key that takes a list of integers. A single integer counts as a list of one."""
    one = integer(minimum, maximum)

    def parse(value: Any) -> tuple[int, ...]:
        parsed = tuple(map(one.parse, _as_list(value)))
        if not parsed or (unique and len(set(parsed)) < len(parsed)):
            raise ValueError
        return parsed

    several = "distinct integers" if unique else "integers"
    return Rule(f"must be an integer or a list of {several}, each{one.text.removeprefix('must be an integer')}", parse)


def largest(minimum: int) -> Rule:
    """Return the rule of a key that takes an integer >= `minimum`. Of a list (in older files), the largest is used."""
    several = integers(minimum)
    return Rule(several.text, lambda value: max(several.parse(value)))


def number(text: str, holds: Callable[[float], bool]) -> Rule:
    def parse(value: Any) -> float:
        if isinstance(value, str) and _NUMBER_WITH_EXPONENT.fullmatch(value):
            value = float(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # A YAML integer may exceed every float.
        if not is_number or abs(value) >= 2**63 or not math.isfinite(value) or not holds(value):
            raise ValueError
        return float(value)

    return Rule(text, parse)


def positive(unit: str) -> Rule:
    return number(f"must be a number of {unit} above 0", lambda value: value > 0)


SECONDS: Final = number("must be a number of seconds between 0 and 3600", lambda value: 0 <= value <= 3600)
TIMEOUT: Final = number(
    f"must be a number of seconds above 0 and at most {MAX_TIMEOUT_S:g}", lambda value: 0 < value <= MAX_TIMEOUT_S
)
FRACTION: Final = number("must be a number above 0 and at most 1", lambda value: 0 < value <= 1)


def _parse_memory(value: Any) -> int:
    """Parse bytes, or text such as "2GB". One GB is 2**30 bytes, as in MindSpore's `max_device_memory`."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)B?", value.strip().upper())
        if match is None:
            raise ValueError
        value = int(float(match[1]) * MEMORY_UNITS[match[2]])
    if not _is_integer(value) or not 2**20 <= value < 2**50:
        raise ValueError
    return int(value)


MEMORY: Final = Rule('must be at least 1 MB: a number of bytes, or text such as "2GB"', _parse_memory)


# --- text -----------------------------------------------------------------------------------------------------------


def boolean(words: Mapping[str, bool]) -> Rule:
    known = {"true": True, "false": False, **words}
    return _rule(
        "must be True or False",
        lambda value: isinstance(value, bool) or (isinstance(value, str) and value.lower() in known),
        lambda value: known[str(value).lower()],
    )


BOOLEAN: Final = boolean({})


def choice(names: Iterable[str], aliases: Mapping[str, str] | None = None) -> Rule:
    """Return the rule of a key that takes one of `names`, in upper or lower case, or an alias of one."""
    known = {name.lower(): name for name in names}
    known |= {alias.lower(): target for alias, target in (aliases or {}).items()}
    return _rule(
        f"must be one of {', '.join(names)}",
        lambda value: isinstance(value, str) and value.lower() in known,
        lambda value: known[value.lower()],
    )


def choices(names: Iterable[str]) -> Rule:
    one = choice(names)
    text = f"must be a list of {', '.join(names)}"
    return _rule(text, lambda value: isinstance(value, list) and value, lambda value: tuple(map(one.parse, value)))


def _matches(pattern: str, value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _text(pattern: str, text: str) -> Rule:
    return _rule(text, lambda value: _matches(pattern, value), str)


def _texts(pattern: str, text: str) -> Rule:
    return _rule(text, lambda value: all(_matches(pattern, item) for item in _as_list(value)), _as_list)


def _as_list(value: Any) -> tuple[Any, ...]:
    items = tuple(value) if isinstance(value, list) else (value,)
    if len(items) > MAX_ITEMS:
        raise ValueError
    return items


def _are_networks(value: Any) -> bool:
    items = _as_list(value)
    if items != ("*",):
        for item in items:
            if not isinstance(item, str):
                return False
            ipaddress.ip_network(item)  # raises a ValueError, also for an address with host bits and a prefix length
    return True


TEXT: Final = _text(r"[^\x00]*", "must be text")
MODEL_NAME: Final = _text(r"[\w.\-/]{1,128}", "must be text of 1 to 128 letters, digits and ._-/")
"""The characters of a model's name are restricted, because it is part of a URL path: `/models/{name}`."""
ROW_NAME: Final = _text(r"[a-z0-9_-]{1,32}", "must be 1 to 32 lowercase letters, digits, _ or -")
"""The characters of a row's name are restricted, because it appears in metrics, errors and request bodies."""
REVISION: Final = _rule(
    "must be a branch, a tag or a commit",
    # YAML reads some commits as numbers.
    lambda value: isinstance(value, str | int) and not isinstance(value, bool) and is_revision(str(value)),
    str,
)
SHA256: Final = _rule(
    "must be the SHA-256 of a key in 64 hexadecimal digits, as `llm-serving hash-key` prints it",
    lambda value: _matches(r"[0-9a-fA-F]{64}", value),
    str.lower,
    shows_value=False,
)
URL: Final = _text(r"https?://[!-~]{1,1000}", "must be a URL that begins with http:// or https://")
MODEL_NAMES: Final = _texts(
    r"\*|[\w.\-/:@+]{1,128}", "must be a list of names, each 1 to 128 letters, digits and ._-/:@+, or *"
)
ORIGINS: Final = _texts(
    r"\*|null|[a-z][a-z0-9+.-]{0,31}://[a-zA-Z0-9.:\[\]_-]{1,255}",
    "must be a list of origins such as https://chat.example.com, null or *",
)
HOST_NAMES: Final = _texts(r"[a-zA-Z0-9.:_-]{1,255}", "must be a list of host names without ports")
PROXIES: Final = _rule(
    "must be a list of addresses and networks such as 10.0.0.5 and 10.0.1.0/24, or * alone", _are_networks, _as_list
)


# --- paths ----------------------------------------------------------------------------------------------------------


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path) and 0 < len(str(value)) < 1024 and "\x00" not in str(value)


def path(kind: Kind) -> Rule:
    """Return the rule of a key that takes a path. The loader resolves the path against the file that it came from."""
    return _rule("must be a path", _is_path, Path, kind=kind)


def path_or_first(kind: Kind) -> Rule:
    """Return the rule of a key that takes a path or, as in YAML files of older servers, a list of exactly one path."""
    one = path(kind)
    return _rule(
        "must be a path or a list of one",
        lambda value: not isinstance(value, list) or len(value) == 1,
        lambda value: one.parse(value[0] if isinstance(value, list) else value),
        kind=kind,
    )


PATH_OR_DASH: Final = _rule(
    "must be a path or -",
    lambda value: value == [None] or _is_path(value),
    lambda value: Path("-" if value == [None] else value),  # YAML reads an unquoted dash as a list with one null
    kind=Kind.LOG,
)
