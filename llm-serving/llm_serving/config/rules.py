"""What a key accepts: a sentence for the error text, and the function that turns YAML into the typed value."""

import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llm_serving.config.kinds import Kind
from llm_serving.errors import shorten
from llm_serving.hub import is_revision

MEMORY_UNITS: Final = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_WITH_EXPONENT: Final = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
"""Numbers, of which YAML 1.1 takes some for texts, such as 1e-9 and 1.0e6."""
LONGEST_S: Final = 10**6
"""Timers of the system count milliseconds in 31 bits."""


@dataclass(frozen=True)
class Rule:
    """A rule for one key.

    Attributes:
        text: What must hold, worded to follow the key: "must be an integer >= 1".
        parse: Turns a plain YAML value into the typed one; raises ValueError when the rule is broken.
        shows_value: Whether an error repeats what was given; not where that may be a secret in the wrong place.
        kind: Of a path: what may lie there. The loader asks for it once it knows where the path leads.
    """

    text: str
    parse: Callable[[Any], Any]
    shows_value: bool = True
    kind: Kind | None = None

    def broken_by(self, value: Any) -> str:
        """What an error says after the key."""
        return f"{self.text}. Given: {shorten(value)}" if self.shows_value else self.text


def option(default: Any, rule: Rule) -> Any:
    """A dataclass field with its rule; the loader reads the rule from the metadata."""
    return field(default=default, metadata={"rule": rule})


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError


def integer(minimum: int, maximum: int = 2**31 - 1) -> Rule:
    def parse(value: Any) -> int:
        _check(isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum)
        return int(value)

    upper = "" if maximum == 2**31 - 1 else f" and <= {maximum}"
    return Rule(f"must be an integer >= {minimum}{upper}", parse)


def one_of(numbers: Sequence[int]) -> Rule:
    def parse(value: Any) -> int:
        _check(isinstance(value, int) and not isinstance(value, bool) and value in numbers)
        return int(value)

    return Rule(f"must be {' or '.join(map(str, numbers))}", parse)


def number(text: str, holds: Callable[[float], bool]) -> Rule:
    """A finite number for which `holds`."""

    def parse(value: Any) -> float:
        if isinstance(value, str) and _WITH_EXPONENT.fullmatch(value):
            value = float(value)
        _check(isinstance(value, int | float) and not isinstance(value, bool))
        # An integer of YAML may be beyond every float.
        _check(abs(value) < 2**63 and math.isfinite(value) and holds(value))
        return float(value)

    return Rule(text, parse)


def seconds(maximum: float = 3600.0) -> Rule:
    return number(f"must be a number of seconds between 0 and {maximum:g}", lambda value: 0 <= value <= maximum)


def positive(unit: str) -> Rule:
    return number(f"must be a number of {unit} above 0", lambda value: value > 0)


def patience() -> Rule:
    """Seconds for which something is waited for."""
    rule = f"must be a number of seconds above 0 and at most {LONGEST_S:g}"
    return number(rule, lambda value: 0 < value <= LONGEST_S)


def share() -> Rule:
    return number("must be a number above 0 and at most 1", lambda value: 0 < value <= 1)


def boolean() -> Rule:
    # Older YAML files quote their booleans.
    words = {"true": True, "false": False}

    def parse(value: Any) -> bool:
        if isinstance(value, str):
            _check(value.lower() in words)
            return words[value.lower()]
        _check(isinstance(value, bool))
        return bool(value)

    return Rule("must be True or False", parse)


def text() -> Rule:
    def parse(value: Any) -> str:
        _check(isinstance(value, str) and "\x00" not in value)
        return str(value)

    return Rule("must be text", parse)


def name() -> Rule:
    # The name becomes part of a URL path (`/models/{name}`).
    def parse(value: Any) -> str:
        _check(isinstance(value, str) and re.fullmatch(r"[\w.\-/]{1,128}", value) is not None)
        return str(value)

    return Rule("must be text of 1 to 128 letters, digits and ._-/", parse)


def row_name() -> Rule:
    # It stands in metrics, errors and request bodies.
    def parse(value: Any) -> str:
        _check(isinstance(value, str) and re.fullmatch(r"[a-z0-9_-]{1,32}", value) is not None)
        return str(value)

    return Rule("must be 1 to 32 of the small letters, digits, _ and -", parse)


def revision() -> Rule:
    """A branch, tag or commit of a model; YAML reads some commits as numbers."""

    def parse(value: Any) -> str:
        _check(isinstance(value, str | int) and not isinstance(value, bool) and is_revision(str(value)))
        return str(value)

    return Rule("must be a branch, a tag or a commit", parse)


def sha256() -> Rule:
    def parse(value: Any) -> str:
        _check(isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{64}", value) is not None)
        return str(value).lower()

    rule = "must be the SHA-256 of a key in 64 hexadecimal digits, as `llm-serving hash-key` prints it"
    return Rule(rule, parse, shows_value=False)


def path(kind: Kind) -> Rule:
    """A path as written; the loader resolves it, because it knows the file it came from, and sees what is there."""

    def parse(value: Any) -> Path:
        _check(isinstance(value, str | Path) and 0 < len(str(value)) < 1024 and "\x00" not in str(value))
        return Path(value)

    return Rule("must be a path", parse, kind=kind)


def path_or_first(kind: Kind) -> Rule:
    """A path, or a list of one: older files list a file for each graph."""
    one = path(kind)

    def parse(value: Any) -> Path:
        _check(not isinstance(value, list) or len(value) == 1)
        return Path(one.parse(value[0] if isinstance(value, list) else value))

    return Rule("must be a path or a list of one", parse, kind=kind)


def path_or_dash() -> Rule:
    """A path, or `-`, which YAML takes for a list with nothing in it where it is not quoted."""
    one = path(Kind.LOG)
    return Rule("must be a path or -", lambda value: one.parse("-" if value == [None] else value), kind=one.kind)


def choice(names: Iterable[str], aliases: Mapping[str, str] | None = None) -> Rule:
    """One of `names`, in any case, or an alias of one."""
    known = {name.lower(): name for name in names}
    known |= {alias.lower(): target for alias, target in (aliases or {}).items()}

    def parse(value: Any) -> str:
        _check(isinstance(value, str) and value.lower() in known)
        return known[value.lower()]

    return Rule(f"must be one of {', '.join(names)}", parse)


def choices(names: Iterable[str]) -> Rule:
    """A list of some of `names`, each perhaps several times."""
    one = choice(names)

    def parse(value: Any) -> tuple[str, ...]:
        _check(isinstance(value, list) and len(value) > 0)
        return tuple(one.parse(item) for item in value)

    return Rule(f"must be a list of {', '.join(names)}", parse)


def integers(minimum: int, maximum: int = 2**31 - 1, unique: bool = False) -> Rule:
    """A list of integers; a single integer is a list of one."""
    one = integer(minimum, maximum)

    def parse(value: Any) -> tuple[int, ...]:
        items = value if isinstance(value, list) else [value]
        _check(0 < len(items) <= 1024)
        parsed = tuple(one.parse(item) for item in items)
        _check(not unique or len(set(parsed)) == len(parsed))
        return parsed

    several = "distinct integers" if unique else "integers"
    return Rule(f"must be an integer or a list of {several}, each{one.text.removeprefix('must be an integer')}", parse)


def model_names() -> Rule:
    """A list of names that clients may give; `*` is any."""
    pattern = re.compile(r"\*|[\w.\-/:@+]{1,128}")
    return _texts(pattern, "must be a list of names, each 1 to 128 letters, digits and ._-/:@+, or *")


def origins() -> Rule:
    """A list of origins as browsers send them: no path, no default port."""
    pattern = re.compile(r"\*|null|[a-z][a-z0-9+.-]{0,31}://[a-zA-Z0-9.:\[\]_-]{1,255}")
    return _texts(pattern, "must be a list of origins such as https://chat.example.com, null or *")


def url() -> Rule:
    def parse(value: Any) -> str:
        _check(isinstance(value, str) and re.fullmatch(r"https?://[!-~]{1,1000}", value) is not None)
        return str(value)

    return Rule("must be a URL that begins with http:// or https://", parse)


def proxies() -> Rule:
    """A list of addresses and networks; `*` alone is any of them."""

    def parse(value: Any) -> tuple[str, ...]:
        items = value if isinstance(value, list) else [value]
        _check(len(items) <= 1024 and all(isinstance(item, str) for item in items))
        if items != ["*"]:
            for item in items:
                ipaddress.ip_network(item)  # raises a ValueError, also for an address of a network with its length
        return tuple(items)

    return Rule("must be a list of addresses and networks such as 10.0.0.5 and 10.0.1.0/24, or * alone", parse)


def host_names() -> Rule:
    pattern = re.compile(r"[a-zA-Z0-9.:_-]{1,255}")
    return _texts(pattern, "must be a list of host names without ports")


def _texts(pattern: re.Pattern[str], text: str) -> Rule:
    def parse(value: Any) -> tuple[str, ...]:
        items = value if isinstance(value, list) else [value]
        _check(len(items) <= 1024 and all(isinstance(item, str) and pattern.fullmatch(item) for item in items))
        return tuple(items)

    return Rule(text, parse)


def largest(minimum: int) -> Rule:
    """An integer, or the largest of a list: older files list the batch sizes a graph was compiled for."""
    several = integers(minimum)
    return Rule(several.text, lambda value: max(several.parse(value)))


def memory() -> Rule:
    """Bytes, or text such as "2GB". One GB is 2**30 bytes, as MindSpore reads `max_device_memory`."""

    def parse(value: Any) -> int:
        if isinstance(value, str):
            match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?B?)", value.strip().upper())
            _check(match is not None)
            assert match is not None
            unit = match[2] if match[2] in MEMORY_UNITS else match[2] + "B"
            value = int(float(match[1]) * MEMORY_UNITS[unit])
        _check(isinstance(value, int) and not isinstance(value, bool) and 2**20 <= value < 2**50)
        return int(value)

    return Rule('must be at least 1 MB: a number of bytes, or text such as "2GB"', parse)
