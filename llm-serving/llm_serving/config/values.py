"""The values of a configuration while it is being put together."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llm_serving.config.schema import SECTIONS, ServingConfig
from llm_serving.config.tables import TableReader
from llm_serving.core.files import is_unicode
from llm_serving.errors import ConfigError, shorten
from llm_serving.hub import HubModel

DEFAULTS: Final[dict[str, Any]] = {
    f"{section}.{item.name}": item.default
    for section, (_, section_type) in SECTIONS.items()
    for item in dataclasses.fields(section_type)
}
"""Every "section.key" and its default."""


class Values:
    """Typed values by "section.key", each with its source; a key not set has its default."""

    def __init__(self, notices: list[str]) -> None:
        self.notices = notices
        self.hub_model: HubModel | None = None
        self._set: dict[str, tuple[Any, str]] = {}

    def __getitem__(self, name: str) -> Any:
        return self._set[name][0] if name in self._set else DEFAULTS[name]

    def set(self, name: str, value: Any, source: str) -> None:
        assert name in DEFAULTS, name
        if isinstance(value, str | Path) and not is_unicode(str(value)):
            rule = "must be text that UTF-8 has a form for"
            raise ConfigError(f"{source}: `{name}` {rule}. Given: {shorten(str(value))}")
        self._set[name] = (value, source)

    def is_given(self, name: str) -> bool:
        return name in self._set

    def source(self, name: str) -> str:
        return self._set[name][1] if name in self._set else "default"

    def error(self, name: str, rule: str, value: Any) -> ConfigError:
        """For a key whose value breaks a rule that begins with a verb."""
        return ConfigError(f"{self.source(name)}: `{name}` {rule}. Given: {value}")

    def notice(self, name: str, text: str) -> None:
        """Tells the operator of something about a key."""
        self.notices.append(f"{self.source(name)}: {name}: {text}")

    def build(self, tables: Mapping[str, TableReader]) -> ServingConfig:
        sections = {
            attribute: section_type(
                **{item.name: self[f"{section}.{item.name}"] for item in dataclasses.fields(section_type)}
            )
            for section, (attribute, section_type) in SECTIONS.items()
        }
        sources = {name: self.source(name) for name in DEFAULTS}
        for table in tables.values():
            sources.update(table.sources())
        return ServingConfig(
            **sections,
            request_classes=tuple(sorted(tables["request_classes"].build(), key=lambda each: each.rank)),
            api_keys=tables["api_keys"].build(),
            sources=sources,
            notices=tuple(self.notices),
            hub_model=self.hub_model,
        )
