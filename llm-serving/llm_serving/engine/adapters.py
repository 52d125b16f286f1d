"""The LoRA adapters that a server offers, by name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llm_serving.config.schema import ServingConfig
from llm_serving.errors import ModelError
from llm_serving.formats.peft import fingerprint, number_of, read_adapter
from llm_serving.log import get_logger
from llm_serving.models.spec import ModelSpec
from llm_serving.network.adapters import AdapterLimits, check_adapter, experts_modules

logger = get_logger(__name__)


@dataclass(frozen=True)
class Adapter:
    name: str
    folder: Path
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()), compare=False)

    @property
    def number(self) -> int:
        """Id of the adapter in requests, steps and recordings. Adapters with equal files have the same id."""
        return number_of(self.fingerprint)

    @property
    def is_unchanged(self) -> bool:
        """Whether all files are the same as when the adapter was loaded. This reads all of them."""
        try:
            return fingerprint(self.folder) == self.fingerprint
        except ModelError:
            return False


class AdapterRegistry:
    """The loaded adapters. Only the event loop changes it; any thread may read it."""

    def __init__(self, config: ServingConfig, spec: ModelSpec) -> None:
        """Read the adapters that the YAML names. Raise ModelError if an adapter cannot be served."""
        self.config = config.lora
        self.by_name: Mapping[str, Adapter] = {}
        self._removed: Mapping[int, Adapter] = {}
        """Adapter number -> adapter that new requests may not name. Unfinished requests may still use it."""
        self._files: dict[int, str] = {}
        """Adapter number -> fingerprint, also of unloaded adapters, because caches may still hold their blocks."""
        self._spec = spec
        for name, folder in (config.lora.lora_modules or {}).items():
            self.add(self.read(name, folder))

    @property
    def folders(self) -> dict[int, str]:
        """Adapter number -> folder from which a new WorkAgent loads the adapter."""
        return {each.number: str(each.folder) for each in (*self._removed.values(), *self.by_name.values())}

    def is_offered(self, number: int) -> bool:
        return any(each.number == number for each in self.by_name.values())

    def read(self, name: str, folder: Path) -> Adapter:
        """Read and check all files of an adapter. Thread-safe. Raise ModelError if it cannot be served."""
        if not self.config.is_enabled:
            raise ModelError(
                "adapters are disabled: set `lora_config.lora_folder` or `lora_config.lora_modules` to enable them"
            )
        limits = AdapterLimits(self.config.max_loras, self.config.max_lora_rank)
        _, linears = self._spec.with_adapters(*limits, as_program=True)
        adapter = read_adapter(folder)
        check_adapter(adapter, linears, experts_modules(self._spec.network), limits.max_rank)
        return Adapter(name, folder, adapter.fingerprint)

    def add(self, adapter: Adapter) -> None:
        """Offer an adapter. Raise ModelError if too many exist, its name is used, or other files have its number."""
        if len(self.by_name) >= self.config.max_adapters:
            most = self.config.max_adapters
            raise ModelError(f"at most {most} adapters can be loaded (lora_config.max_cpu_loras); unload one first")
        if adapter.name in self.by_name:
            raise ModelError(f"the adapter {adapter.name} is loaded already; unload it first")
        if self._files.setdefault(adapter.number, adapter.fingerprint) != adapter.fingerprint:
            fault = "which belongs to an adapter with other files that was loaded before"
            advice = "The number is computed from the files. To change it, save the adapter with different metadata"
            raise ModelError(f"the adapter {adapter.name} has the number {adapter.number}, {fault}. {advice}")
        self.by_name = {**self.by_name, adapter.name: adapter}
        logger.info(
            "offering adapter %s: folder=%s fingerprint=%s", adapter.name, adapter.folder, adapter.fingerprint[:12]
        )

    def find_changed(self, number: int) -> list[Adapter]:
        return [each for each in self.by_name.values() if each.number == number and not each.is_unchanged]

    def remove(self, name: str) -> Adapter | None:
        """Stop offering an adapter. Until `forget` is called, new WorkAgents load it for its unfinished requests."""
        adapter = self.by_name.get(name)
        if adapter is not None:
            self._removed = {**self._removed, adapter.number: adapter}
        self.by_name = {each: kept for each, kept in self.by_name.items() if each != name}
        return adapter

    def forget(self, adapter: Adapter) -> None:
        """Stop loading a removed adapter. Call this when it has no requests, or an offered one has the same files."""
        self._removed = {number: each for number, each in self._removed.items() if number != adapter.number}
