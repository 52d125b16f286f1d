"""Convert the `config.json` of MindIE-Service into a serving YAML: `llm-serving config import`.

Keys that this server has are converted and checked. Notes list other keys if this server behaves differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from llm_serving.config.schema import RULES
from llm_serving.core.files import read_json
from llm_serving.errors import ConfigError, ModelError, shorten

MAX_BYTES: Final = 2**20
FIRST_AGENT_PORT: Final = 16002


class Converted(NamedTuple):
    key: str
    convert: Callable[[Any], Any] = lambda value: value


class Dropped(NamedTuple):
    """A MindIE key that this server does not have. A note gives its value and `reason`, unless `reason` is empty."""

    reason: str
    usual: tuple[Any, ...] = ()
    """Values that match this server's behavior and need no note."""


@dataclass
class Imported:
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_yaml(self, source: str) -> str:
        sections: dict[str, dict[str, Any]] = {}
        for name, value in self.values.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        lines = [*(f"# {_one_line(text)}" for text in (f"From {source} of MindIE.", *self.notes)), ""]
        return "\n".join(lines) + yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


def import_mindie(path: Path) -> Imported:
    """Convert a MindIE configuration file. Raise ConfigError if its format or one of its values is not supported."""
    try:
        content = read_json(path, MAX_BYTES)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(content, dict) or not {"ServerConfig", "BackendConfig"} & content.keys():
        raise ConfigError(f"{path}: must be a JSON object with ServerConfig and BackendConfig, as in MindIE")
    imported = Imported({"device_config.device_target": "Ascend"})
    given = dict(_flatten(content, ""))
    for name, value in given.items():
        _convert(path, name, value, imported)
    _convert_devices(path, given, imported)
    _convert_certificates(given, imported)
    return imported


def _flatten(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) pairs. If the file lists several models, only the first one is read."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict):
            yield from _flatten(item, f"{name}.")
        elif key == "ModelConfig" and isinstance(item, list) and item and isinstance(item[0], dict):
            yield from _flatten(item[0], f"{name}[0].")
            yield from ((f"{name}[{i}]", other) for i, other in enumerate(item) if i)
        else:
            yield name, item


def _convert(path: Path, name: str, value: Any, imported: Imported) -> None:
    meaning = KEYS.get(name)
    if meaning is None:
        reason = next((why for prefix, why in PREFIXES.items() if name.startswith(prefix)), "is not known")
        imported.notes.append(f"{name}: {shorten(value)} {reason}")
    elif isinstance(meaning, Converted):
        try:
            converted = meaning.convert(value)
            RULES[meaning.key].parse(converted)
        except (ValueError, TypeError, ArithmeticError):
            raise ConfigError(f"{path}: {name}: {meaning.key} {RULES[meaning.key].broken_by(value)}") from None
        imported.values[meaning.key] = converted
    elif meaning.reason and value not in meaning.usual:
        imported.notes.append(f"{name}: {shorten(value)} {meaning.reason}")


def _convert_devices(path: Path, given: Mapping[str, Any], imported: Imported) -> None:
    devices, count = given.get(f"{_BACKEND}npuDeviceIds"), given.get(f"{_BACKEND}modelInstanceNumber", 1)
    if not isinstance(count, int) or not 1 <= count <= 1024:
        raise ConfigError(f"{path}: {_BACKEND}modelInstanceNumber must be an integer >= 1. Given: {shorten(count)}")
    imported.values["serving_config.agent_ports"] = [FIRST_AGENT_PORT + index for index in range(count)]
    if devices is None:
        return
    groups = devices if isinstance(devices, list) else []
    if not groups or not all(isinstance(group, list) and group and all(map(_is_device, group)) for group in groups):
        rule = "must be a list of lists of integers >= 0"
        raise ConfigError(f"{path}: {_BACKEND}npuDeviceIds {rule}. Given: {shorten(devices)}")
    imported.values["serving_config.start_device_id"] = groups[0][0]
    if any(len(group) > 1 for group in groups):
        imported.notes.append(
            f"{_BACKEND}npuDeviceIds: {shorten(devices)} has several devices for one instance; see "
            "cluster_config.tensor_parallel for ranks, serving_config.agent_ports for further replicas"
        )
    elif [group[0] for group in groups] != list(range(groups[0][0], groups[0][0] + len(groups))):
        imported.notes.append(
            f"{_BACKEND}npuDeviceIds: {shorten(devices)} has gaps; WorkAgents use consecutive devices"
        )


def _convert_certificates(given: Mapping[str, Any], imported: Imported) -> None:
    if given.get("ServerConfig.httpsEnabled") is not False:
        imported.notes.append(
            "ServerConfig.tlsPkPwd: MindIE's password files are encrypted by its own tool; "
            "serving_config.ssl_keyfile_password_file names one in plain text"
        )
        return
    for key in ("serving_config.ssl_certfile", "serving_config.ssl_keyfile"):
        imported.values.pop(key, None)


def _is_device(value: Any) -> bool:
    return type(value) is int and value >= 0


def _one_line(text: str) -> str:
    """Escape line breaks, which would end a YAML comment, and control characters, which YAML forbids."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _policy(value: Any) -> str:
    if not isinstance(value, bool):
        raise TypeError
    return "throughput" if value else "prefill_first"


def _level(value: Any) -> Any:
    return {"WARN": "WARNING", "VERBOSE": "DEBUG", "CRITICAL": "ERROR"}.get(str(value).upper(), str(value).upper())


_BACKEND: Final = "BackendConfig."
_DEPLOY: Final = f"{_BACKEND}ModelDeployConfig."
_MODEL: Final = f"{_DEPLOY}ModelConfig[0]."
_SCHEDULE: Final = f"{_BACKEND}ScheduleConfig."
_ORDER: Final = "has no counterpart; scheduler_config.order is the order within a class"

KEYS: Final[Mapping[str, Converted | Dropped]] = {
    "Version": Dropped(""),
    "LogConfig.logLevel": Converted("serving_config.log_level", _level),
    "ServerConfig.ipAddress": Converted("serving_config.server_ip"),
    "ServerConfig.port": Converted("serving_config.server_port"),
    "ServerConfig.maxLinkNum": Converted("serving_config.max_connections"),
    "ServerConfig.e2eTimeout": Converted("serving_config.max_timeout_s"),
    "ServerConfig.tokenTimeout": Converted("serving_config.step_timeout_s"),
    "ServerConfig.tlsCert": Converted("serving_config.ssl_certfile"),
    "ServerConfig.tlsPk": Converted("serving_config.ssl_keyfile"),
    "ServerConfig.tlsPkPwd": Dropped(""),
    "ServerConfig.httpsEnabled": Dropped(""),
    "ServerConfig.inferMode": Dropped("has no counterpart; see cluster_config.roles", ("standard",)),
    "ServerConfig.allowAllZeroIpListening": Dropped("has no counterpart: 0.0.0.0 is accepted, with a notice"),
    "ServerConfig.fullTextEnabled": Dropped("is not served: streams contain only new text", (False,)),
    "ServerConfig.openAiSupport": Dropped("is not served", ("vllm", "openai")),
    f"{_BACKEND}backendName": Dropped(""),
    f"{_BACKEND}modelInstanceNumber": Dropped(""),
    f"{_BACKEND}npuDeviceIds": Dropped(""),
    f"{_BACKEND}tokenizerProcessNumber": Dropped("has no counterpart: the master tokenizes, long texts in threads"),
    f"{_BACKEND}multiNodesInferEnabled": Dropped("is not served: a replica runs on one machine", (False,)),
    f"{_DEPLOY}maxSeqLen": Converted("model_config.max_generate_length"),
    f"{_DEPLOY}maxInputTokenLen": Converted("model_config.seq_length"),
    f"{_DEPLOY}truncation": Dropped("is set by each request: `truncate_prompt_tokens`", (False,)),
    f"{_MODEL}modelName": Converted("model_config.model_name"),
    f"{_MODEL}modelWeightPath": Converted("model_config.model_path"),
    f"{_MODEL}modelInstanceType": Dropped("is not served", ("Standard", "StandardMock")),
    f"{_MODEL}worldSize": Dropped("has no counterpart; see cluster_config.tensor_parallel", (1,)),
    f"{_MODEL}cpuMemSize": Dropped("is GB of host memory for swapping: pa_config.num_swap_blocks counts blocks", (0,)),
    f"{_MODEL}npuMemSize": Dropped("is GB of the KV cache: device_config.max_device_memory includes weights", (-1,)),
    f"{_MODEL}backendType": Dropped("has no counterpart: MindSpore computes", ("ms",)),
    f"{_MODEL}trustRemoteCode": Dropped("is not served: no code of a model folder is run", (False,)),
    f"{_SCHEDULE}templateType": Dropped("has no counterpart; see cluster_config.roles", ("Standard", "Mix")),
    f"{_SCHEDULE}templateName": Dropped(""),
    f"{_SCHEDULE}cacheBlockSize": Converted("pa_config.block_size"),
    f"{_SCHEDULE}maxPrefillBatchSize": Converted("model_config.prefill_batch_size"),
    f"{_SCHEDULE}maxPrefillTokens": Converted("scheduler_config.max_prefill_tokens"),
    f"{_SCHEDULE}prefillTimeMsPerReq": Converted("scheduler_config.prefill_time_ms_per_req"),
    f"{_SCHEDULE}decodeTimeMsPerReq": Converted("scheduler_config.decode_time_ms_per_req"),
    f"{_SCHEDULE}supportSelectBatch": Converted("scheduler_config.policy", _policy),
    f"{_SCHEDULE}prefillPolicyType": Dropped(_ORDER, (0,)),
    f"{_SCHEDULE}decodePolicyType": Dropped(_ORDER, (0,)),
    f"{_SCHEDULE}maxBatchSize": Converted("model_config.decode_batch_size"),
    f"{_SCHEDULE}maxIterTimes": Dropped("has no counterpart: each request has its `max_tokens`"),
    f"{_SCHEDULE}maxPreemptCount": Dropped("is per batch: scheduler_config.max_preemptions_per_request is per request"),
    f"{_SCHEDULE}maxQueueDelayMicroseconds": Converted(
        "model_config.batch_waiting_time", lambda value: float(value) / 1e6
    ),
    f"{_SCHEDULE}maxFirstTokenWaitTime": Dropped("is in ms: a request class has a `ttft_slo_s`, in seconds"),
}
"""Dotted name of a MindIE key -> its counterpart, or the reason why it has none."""
PREFIXES: Final[Mapping[str, str]] = {
    "LogConfig.": "has no counterpart: logs go to the standard error, `start` keeps them in its run folder",
    "ServerConfig.tls": "has no counterpart: clients authenticate by API keys, not by certificates",
    "ServerConfig.management": "has no counterpart: health and metrics are on the port of the server",
    "ServerConfig.metrics": "has no counterpart: /metrics is on the port of the server",
    "ServerConfig.kmc": "has no counterpart: nothing is encrypted by MindIE's tool",
    "ServerConfig.interComm": "has no counterpart; see cluster_config.roles",
    f"{_BACKEND}interNode": "has no counterpart: a replica runs on one machine",
    f"{_BACKEND}multiNodes": "has no counterpart: a replica runs on one machine",
}
