"""The typed configuration: one frozen dataclass for each section. In YAML, `null` means "not given"."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from llm_serving.config.rules import Option, Rule
from llm_serving.config.sections.cluster import ClusterConfig
from llm_serving.config.sections.device import CacheConfig, DeviceConfig, QuantConfig, groups_layers
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.config.sections.server import ServerConfig
from llm_serving.config.tables import TABLES, ApiKey
from llm_serving.core.enums import KVCacheDtypeName, RoleName, SpeculativeMethodName
from llm_serving.core.request_class import DEFAULT_CLASSES, RequestClass
from llm_serving.hub import HubModel
from llm_serving.models.memory import num_state_slots
from llm_serving.models.spec import ModelSpec

__all__ = ["DEFAULTS", "OPTIONS", "RULES", "SECTIONS", "TABLES", "ApiKey", "Origin", "ServingConfig"]


@dataclass(frozen=True)
class Origin:
    path: Path | None
    overrides: tuple[str, ...]
    model: str | Path | None
    row: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    serving: ServerConfig = field(default_factory=ServerConfig)
    pa: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    request_classes: tuple[RequestClass, ...] = DEFAULT_CLASSES
    api_keys: tuple[ApiKey, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """"section.key" or "section.row.key" -> source of its value: "default", "file:line" or a flag such as "--set"."""
    notices: tuple[str, ...] = ()
    """Sentences for the operator: keys without effect, renamed keys, surprising combinations."""
    hub_model: HubModel | None = None
    """The model, if `model_path` is a name on a hub. Its weights may not be downloaded yet."""
    model_hint: str = ""
    """Why the weights that a MindFormers YAML names cannot be served directly, and what to do. Empty if they can."""
    origin: Origin | None = field(default=None, compare=False)
    """Arguments of `load_config` to load the configuration again, or None if it was made without `load_config`."""
    models: tuple["ServingConfig", ...] = field(default=(), compare=False)
    """The configuration of each row of the section `models`; the first is `self`. Empty without this section."""
    memory_share: float = 1.0
    """This model's part of the memory that all models of the server may use together."""
    load_at_start: bool = True

    @property
    def num_replicas(self) -> int:
        return self.cluster.replicas or len(self.serving.agent_ports)

    @property
    def roles(self) -> tuple[RoleName, ...]:
        return tuple(map(RoleName, self.cluster.roles or (RoleName.BOTH,) * self.num_replicas))

    @property
    def num_transfer_blocks(self) -> int:
        """KV blocks of each replica in the transfer pool; 0 if neither disaggregation nor a disk cache is enabled."""
        if self.pa.disk_cache_path is not None:
            return 2 * self.num_disk_blocks
        if RoleName.PREFILL not in self.roles:
            return 0
        return self.cluster.num_transfer_blocks or 4 * self._longest_blocks

    @property
    def num_disk_blocks(self) -> int:
        """Number of KV blocks in each of two buffers, for disk reads and disk writes; 0 without a disk cache."""
        return 0 if self.pa.disk_cache_path is None else self._longest_blocks

    @property
    def _longest_blocks(self) -> int:
        return -(-self.model.max_generate_length // self.pa.block_size)

    def num_state_slots(self, state_bytes: int) -> int:
        """Return the number of recurrent states per WorkAgent; 0 if `state_bytes` is 0, so the model has none."""
        return num_state_slots(state_bytes, self.model.decode_batch_size, self.pa.num_state_slots)

    @property
    def groups_layers(self) -> bool:
        # A layer for multi-token prediction reads the blocks of all layers.
        uses_mtp = self.scheduler.speculative_method == SpeculativeMethodName.MTP
        target, kernels, disk_cache = self.device.device_target, self.device.kernels, self.pa.disk_cache_path
        return not uses_mtp and groups_layers(target, kernels, disk_cache)

    def served_spec(self, spec: ModelSpec) -> ModelSpec:
        int8 = self.quant.kv_cache_dtype == KVCacheDtypeName.INT8
        return spec.with_cache_groups(self.model.max_generate_length, int8=int8) if self.groups_layers else spec

    @property
    def num_processes(self) -> int:
        return self.num_replicas * self.cluster.tensor_parallel


SECTIONS: Final[Mapping[str, tuple[str, type]]] = {
    "model_config": ("model", ModelConfig),
    "serving_config": ("serving", ServerConfig),
    "pa_config": ("pa", CacheConfig),
    "scheduler_config": ("scheduler", SchedulerConfig),
    "device_config": ("device", DeviceConfig),
    "quant_config": ("quant", QuantConfig),
    "cluster_config": ("cluster", ClusterConfig),
    "lora_config": ("lora", LoraConfig),
}

_FIELDS: Final = {
    f"{section}.{item.name}": item for section, (_, section_type) in SECTIONS.items() for item in fields(section_type)
}
OPTIONS: Final[Mapping[str, Option]] = {name: item.metadata["option"] for name, item in _FIELDS.items()}
RULES: Final[Mapping[str, Rule]] = {name: option.rule for name, option in OPTIONS.items()}
DEFAULTS: Final[Mapping[str, Any]] = {name: item.default for name, item in _FIELDS.items()}
