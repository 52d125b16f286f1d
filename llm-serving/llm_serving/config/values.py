"""The values of a configuration while the loader checks them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_serving.core.files import is_unicode
from llm_serving.errors import ConfigError, shorten
from llm_serving.hub import HubModel


class Values:
    """Typed values by "section.key", each with its source. A key that is not set has its default."""

    def __init__(self, defaults: Mapping[str, Any], notices: list[str]) -> None:
        self.notices = notices
        self.hub_model: HubModel | None = None
        self.model_hint = ""
        self._defaults = defaults
        self._set: dict[str, tuple[Any, str]] = {}

    def __getitem__(self, name: str) -> Any:
        return self._set[name][0] if name in self._set else self._defaults[name]

    def set(self, name: str, value: Any, source: str) -> None:
        assert name in self._defaults, name
        if isinstance(value, str | Path) and not is_unicode(str(value)):
            rule = "must be text that can be written in UTF-8"
            raise ConfigError(f"{source}: `{name}` {rule}. Given: {shorten(str(value))}")
        self._set[name] = (value, source)

    def is_given(self, name: str) -> bool:
        return name in self._set

    def source(self, name: str) -> str:
        return self._set[name][1] if name in self._set else "default"

    def error(self, name: str, rule: str, value: Any = ...) -> ConfigError:
        """Return the error that key `name` breaks `rule`, with the given `value` or, by default, the key's value."""
        return ConfigError(f"{self.source(name)}: `{name}` {rule}. Given: {self[name] if value is ... else value}")

    def require(self, name: str, allowed: tuple[Any, ...], condition: str) -> None:
        """Raise ConfigError unless the key has an allowed value. `condition` states when and why the rule applies."""
        if self[name] not in allowed:
            accepted = " or ".join("null" if value is None else str(value) for value in allowed)
            raise self.error(name, f"must be {accepted} {condition}")

    def notice(self, name: str, text: str) -> None:
        """Add a notice about a key; a starting server logs it as a warning."""
        self.notices.append(f"{self.source(name)}: {name}: {text}")
