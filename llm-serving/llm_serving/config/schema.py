"""The typed configuration: one frozen dataclass a section, with unit and meaning under each key.

In YAML, `null` always means "not given": the default applies. Keys whose type allows None give that None a meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llm_serving.config.rules import Rule, boolean, integer, positive, row_name, sha256, share
from llm_serving.config.sections.api_key import ApiKey
from llm_serving.config.sections.cache import CacheConfig
from llm_serving.config.sections.cluster import ClusterConfig
from llm_serving.config.sections.device import DeviceConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.quant import QuantConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.enums import RoleName
from llm_serving.core.request_class import DEFAULT_CLASSES, MAX_PRIORITY, RequestClass
from llm_serving.hub import HubModel


@dataclass(frozen=True)
class Origin:
    """What `load_config` was called with, so that it can be called again."""

    path: Path | None
    overrides: tuple[str, ...]
    model: str | Path | None


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The whole configuration, checked.

    Attributes:
        request_classes: By rank, at least one.
        api_keys: Who may ask; empty: everybody.
        sources: "section.key", or "section.row.key" -> where the value came from: "default", "file:line", "--set",
            "--model", "model config.json".
        notices: Sentences for the operator: keys without meaning, surprising combinations.
        hub_model: The model, where `model_path` was a name; perhaps its weights are still to be downloaded.
        origin: What it was read from; None: it was not read.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    serving: ServerConfig = field(default_factory=ServerConfig)
    pa: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    request_classes: tuple[RequestClass, ...] = DEFAULT_CLASSES
    api_keys: tuple[ApiKey, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    hub_model: HubModel | None = None
    origin: Origin | None = field(default=None, compare=False)

    @property
    def num_replicas(self) -> int:
        """Of the model; each is a WorkAgent, or several that compute it together."""
        return self.cluster.replicas or len(self.serving.agent_ports)

    @property
    def roles(self) -> tuple[RoleName, ...]:
        """Of each replica."""
        return tuple(map(RoleName, self.cluster.roles or (RoleName.BOTH,) * self.num_replicas))

    @property
    def num_transfer_blocks(self) -> int:
        """That each replica hands requests over by; 0: none moves."""
        if RoleName.PREFILL not in self.roles:
            return 0
        longest = -(-self.model.max_generate_length // self.pa.block_size)
        return self.cluster.num_transfer_blocks or 4 * longest

    @property
    def num_processes(self) -> int:
        """WorkAgents of all replicas."""
        return self.num_replicas * self.cluster.tensor_parallel


SECTIONS: Final[Mapping[str, tuple[str, type]]] = {
    "model_config": ("model", ModelConfig),
    "serving_config": ("serving", ServerConfig),
    "pa_config": ("pa", CacheConfig),
    "scheduler_config": ("scheduler", SchedulerConfig),
    "device_config": ("device", DeviceConfig),
    "quant_config": ("quant", QuantConfig),
    "cluster_config": ("cluster", ClusterConfig),
}
"""YAML section -> attribute of `ServingConfig`, dataclass."""


@dataclass(frozen=True)
class Table:
    """A section of named rows.

    Attributes:
        row_type: Dataclass of a row; its `name` is the key the row stands under.
        rules: Key of a row -> its rule. A key without a default in `row_type` must be given.
        default: The rows when the section is left out.
    """

    row_type: type
    rules: Mapping[str, Rule]
    default: tuple[Any, ...] = ()


ROW_NAME: Final = row_name()


TABLES: Final[Mapping[str, Table]] = {
    "request_classes": Table(
        RequestClass,
        {
            "rank": integer(-MAX_PRIORITY, MAX_PRIORITY),
            "weight": integer(1, 10**6),
            "ageing_steps": integer(1, 10**9),
            "ttft_slo_s": positive("seconds"),
            "tpot_slo_s": positive("seconds"),
            "max_waiting": integer(1, 10**6),
            "max_running_share": share(),
            "max_kv_share": share(),
        },
        DEFAULT_CLASSES,
    ),
    "api_keys": Table(
        ApiKey,
        {
            "key_sha256": sha256(),
            "highest_class": ROW_NAME,
            "max_waiting": integer(1, 10**6),
            "max_running": integer(1, 10**6),
            "admin": boolean(),
            "max_requests_per_minute": integer(1, 10**9),
            "max_tokens_per_minute": integer(1, 10**12),
        },
    ),
}
"""YAML section, which is also the attribute of `ServingConfig` -> what its rows hold."""
