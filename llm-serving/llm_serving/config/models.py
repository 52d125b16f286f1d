"""The section `models`: several models in one server, each with its own path and sections."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from llm_serving.config.rules import BOOLEAN, FRACTION, MODEL_NAME, Rule, nearest
from llm_serving.config.schema import ServingConfig
from llm_serving.config.yaml_reader import Located, plain
from llm_serving.core.enums import EngineName
from llm_serving.errors import ConfigError, shorten

SECTION: Final = "models"
SHORT_KEYS: Final = {
    "path": "model_config.model_path",
    "aliases": "model_config.model_aliases",
    "dtype": "model_config.model_dtype",
    "quantization": "quant_config.quantization",
    "replicas": "cluster_config.replicas",
}
OWN_KEYS: Final[dict[str, Rule]] = {"memory_share": FRACTION, "load": BOOLEAN}
MODEL_SECTIONS: Final = (
    "model_config",
    "pa_config",
    "scheduler_config",
    "quant_config",
    "device_config",
    "cluster_config",
    "lora_config",
)
"""Sections that a row may have. The others belong to the server as a whole."""
OF_ROWS: Final = ("model_config.model_path", "model_config.model_name", "model_config.model_aliases")


@dataclass
class ModelRow:
    name: str
    where: str
    keys: list[tuple[str, Located]] = field(default_factory=list)
    """("section.key", value), in the order of the file."""
    memory_share: float | None = None
    load: bool = True


def read_row(name: str, content: Located) -> ModelRow:
    """Parse one entry of the section `models`. Raise ConfigError if the name, a key or a value is invalid."""
    MODEL_NAME.value_of(f"a name in `{SECTION}`", name, content.where)
    row = ModelRow(name, content.where)
    for key, item in content.items():
        if key in OWN_KEYS:
            if item.value is not None:
                setattr(row, key, OWN_KEYS[key].value_of(f"`{SECTION}.{name}.{key}`", plain(item), item.where))
        elif key in SHORT_KEYS:
            row.keys.append((SHORT_KEYS[key], item))
        elif key in MODEL_SECTIONS:
            row.keys += [(f"{key}.{inner}", value) for inner, value in item.items()]
            if "model_config.model_name" in dict(row.keys):
                rule = "must be left out: the row's name is the model's"
                raise ConfigError(f"{item.where}: `{SECTION}.{row.name}.model_config.model_name` {rule}")
        else:
            known = nearest(key, [*SHORT_KEYS, *OWN_KEYS, *MODEL_SECTIONS])
            raise ConfigError(f"{item.where}: unknown key `{SECTION}.{name}.{key}`; {known}")
    if "model_config.model_path" not in [key for key, item in row.keys if item.value is not None]:
        raise ConfigError(f"{row.where}: `{SECTION}.{name}.path` must be given: a folder, or a name on a hub")
    return row


def combine(rows: Sequence[ModelRow], configs: Sequence[ServingConfig]) -> tuple[ServingConfig, ...]:
    """Return `configs` with the memory, threads and devices of the machine divided among them. `rows`: their entries
    in the YAML list. Raise ConfigError if models conflict.
    """
    _check_names(rows, configs)
    for row, config in zip(rows, configs, strict=True):
        if config.cluster.engine != EngineName.LOCAL:
            rule = f"must be local with `{SECTION}`"
            raise ConfigError(f"{row.where}: `cluster_config.engine` {rule}. Given: {config.cluster.engine}")
    given = sum(row.memory_share or 0.0 for row in rows)
    without = sum(row.memory_share is None for row in rows)
    if given > 1.0 or (without and given >= 1.0):
        rule = f"must be {'below' if without else 'at most'} 1 in total"
        raise ConfigError(f"{rows[0].where}: the values of `{SECTION}.*.memory_share` {rule}. Given: {given:g}")
    rest = (1.0 - given) / max(1, without)
    num_processes = sum(config.num_processes for config in configs)
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    combined, first_device = list[ServingConfig](), configs[0].serving.start_device_id
    for row, config in zip(rows, configs, strict=True):
        record_path = config.scheduler.record_path
        combined.append(
            replace(
                config,
                device=replace(config.device, num_threads=config.device.num_threads or num_threads),
                serving=replace(config.serving, start_device_id=first_device),
                scheduler=replace(config.scheduler, record_path=record_path and record_path / row.name),
                memory_share=rest if row.memory_share is None else row.memory_share,
                load_at_start=row.load,
            )
        )
        first_device += config.num_processes
    if not combined[0].load_at_start:
        rule = "must be true for the first model, to which requests without `model` go"
        raise ConfigError(f"{rows[0].where}: `{SECTION}.{rows[0].name}.load` {rule}. Given: False")
    return tuple(combined)


def _check_names(rows: Sequence[ModelRow], configs: Sequence[ServingConfig]) -> None:
    for name, count in Counter(name for config in configs for name in all_names_of(config)).items():
        if count > 1:
            owners = [row.name for row, config in zip(rows, configs, strict=True) if name in all_names_of(config)]
            given = f"Given: {shorten(name)} in {' and '.join(owners)}"
            rule = f"names, aliases and adapters in `{SECTION}` must differ"
            raise ConfigError(f"{rows[0].where}: {rule}. {given}")


def names_of(config: ServingConfig) -> Iterator[str]:
    yield config.model.model_name
    yield from config.model.model_aliases


def all_names_of(config: ServingConfig) -> Iterator[str]:
    """Yield the names of a model, and the names of the adapters that it loads at its start."""
    yield from names_of(config)
    yield from config.lora.lora_modules or ()
