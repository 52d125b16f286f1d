"""Section `lora_config`: low-rank adapters, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm_serving.config.paths import Kind
from llm_serving.config.rules import MODEL_NAME, Rule, integer, one_of, option, path
from llm_serving.config.values import Values
from llm_serving.core.enums import ImplementationName
from llm_serving.formats.peft import read_config
from llm_serving.models.spec import ModelSpec

MODULES: Final = "lora_config.lora_modules"
FOLDER: Final = "lora_config.lora_folder"
MAX_LORAS: Final = "lora_config.max_loras"
MAX_CPU_LORAS: Final = "lora_config.max_cpu_loras"
_RANKS: Final = (8, 16, 32, 64, 128, 256)


def _parse_modules(value: Any) -> dict[str, Path]:
    if not isinstance(value, dict):
        raise ValueError
    one = path(Kind.FOLDER)
    return {MODEL_NAME.parse(name): one.parse(folder) for name, folder in value.items()}


_MODULES: Final = Rule("must map names of adapters to their folders", _parse_modules)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Section `lora_config`: low-rank adapters (LoRA) in PEFT's form, which requests select by `model`."""

    lora_modules: Mapping[str, Path] | None = option(None, _MODULES)
    """Adapters to load at the start: name, which requests give as `model` -> folder with adapter_config.json and
    adapter_model.safetensors. null: none."""
    lora_folder: Path | None = option(None, path(Kind.FOLDER))
    """Folder from which administrators may load adapters: `POST /v1/load_lora_adapter`. null: the server refuses it."""
    max_loras: int = option(4, integer(1, 256))
    """Number of adapter slots in device memory, and so of adapters that one step can use. Requests for others wait."""
    max_lora_rank: int = option(16, one_of(_RANKS))
    """Highest rank of an adapter. Each of the `max_loras` slots takes memory for this rank."""
    max_cpu_loras: int | None = option(None, integer(1, 4096))
    """Maximum number of adapters in host memory, including those in slots. null: 16 times `max_loras`, or the number of
    `lora_modules` if that is larger."""

    @property
    def is_enabled(self) -> bool:
        return bool(self.lora_modules) or self.lora_folder is not None

    @property
    def max_adapters(self) -> int:
        return self.max_cpu_loras or max(len(self.lora_modules or ()), 16 * self.max_loras)

    def folder_of(self, given: str) -> Path | None:
        """Return the folder `given` inside `lora_folder`, with symbolic links resolved; None if there is none."""
        if self.lora_folder is None:
            return None
        try:
            inside = self.lora_folder.resolve()
            folder = (inside / given).resolve()
            return folder if folder != inside and folder.is_relative_to(inside) and folder.is_dir() else None
        except (OSError, RuntimeError, ValueError):  # name too long or with a null byte; cycle of links
            return None


def check_lora(values: Values, spec: ModelSpec | None) -> None:
    """Raise ConfigError if the adapters cannot be served with the other keys; ModelError for a damaged adapter."""
    modules: Mapping[str, Path] = values[MODULES] or {}
    if not modules and values[FOLDER] is None:
        return
    named = MODULES if modules else FOLDER
    if values["model_config.implementation"] != ImplementationName.NATIVE:
        raise values.error(named, "must come with `model_config.implementation: native`")
    if values["model_config.mindir_path"] is not None:
        raise values.error(named, "must not come with `model_config.mindir_path`: exported graphs have no adapters")
    if not {values["model_config.model_name"], *values["model_config.model_aliases"]}.isdisjoint(modules):
        raise values.error(MODULES, "must have other names than `model_config.model_name` and `model_aliases`")
    most = values[MAX_CPU_LORAS]
    if most is not None and most < max(len(modules), values[MAX_LORAS]):
        rule = f"must be at least `max_loras` and the number of `lora_modules` ({len(modules)})"
        raise values.error(MAX_CPU_LORAS, rule)
    for folder in modules.values():
        read_config(folder)
