"""The `config.json` of MindIE-Service as a YAML of ours: `llm-serving config import`.

What has a counterpart is carried over and checked by its rule. Everything else is named with its value, either with the
reason why nothing follows from it or as a key that is not known; what says the same as happens here anyhow is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from llm_serving.config.loader import RULES
from llm_serving.core.files import read_regular
from llm_serving.errors import ConfigError, ModelError, shorten

MAX_BYTES: Final = 2**20
FIRST_AGENT_PORT: Final = 16002


class Carried(NamedTuple):
    """A key that has a counterpart."""

    key: str
    read: Callable[[Any], Any] = lambda value: value


class Left(NamedTuple):
    """A key from which nothing follows."""

    why: str
    usual: tuple[Any, ...] = ()
    """Values that say what is so here anyhow."""


@dataclass
class Imported:
    """What a file comes to.

    Attributes:
        values: "section.key" -> value.
        notes: What was not carried over, a sentence each.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_yaml(self, source: str) -> str:
        """A file of ours, with the notes as comments."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in self.values.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        lines = [f"# From {source} of MindIE.", *(f"# {note}" for note in self.notes), ""]
        return "\n".join(lines) + yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


def import_mindie(path: Path) -> Imported:
    """Reads a file.

    Raises:
        ConfigError: It is no such file, or a value breaks the rule of its counterpart.
    """
    try:
        content = json.loads(read_regular(path, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ModelError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(content, dict) or not {"ServerConfig", "BackendConfig"} & content.keys():
        raise ConfigError(f"{path}: must be a JSON object with ServerConfig and BackendConfig, as MindIE has it")
    imported = Imported({"device_config.device_target": "Ascend"})
    given = dict(_flat(content, ""))
    for name, value in given.items():
        _take(path, name, value, imported)
    _take_devices(path, given, imported)
    _take_certificates(given, imported)
    return imported


def _flat(value: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """Dotted name -> value; of a list of models, the first counts and others are told."""
    for key, each in value.items():
        name = f"{place}{key}"
        if isinstance(each, dict):
            yield from _flat(each, f"{name}.")
        elif key == "ModelConfig" and isinstance(each, list) and each and isinstance(each[0], dict):
            yield from _flat(each[0], f"{name}[0].")
            yield from ((f"{name}[{i}]", other) for i, other in enumerate(each) if i)
        else:
            yield name, each


def _take(path: Path, name: str, value: Any, imported: Imported) -> None:
    meaning = KEYS.get(name)
    if meaning is None:
        reason = next((why for prefix, why in PREFIXES.items() if name.startswith(prefix)), "is not known")
        imported.notes.append(f"{name}: {shorten(value)} {reason}")
    elif isinstance(meaning, Carried):
        try:
            read = meaning.read(value)
            RULES[meaning.key].parse(read)
        except (ValueError, TypeError, ArithmeticError):
            raise ConfigError(f"{path}: {name}: {meaning.key} {RULES[meaning.key].broken_by(value)}") from None
        imported.values[meaning.key] = read
    elif meaning.why and value not in meaning.usual:
        imported.notes.append(f"{name}: {shorten(value)} {meaning.why}")


def _take_devices(path: Path, given: Mapping[str, Any], imported: Imported) -> None:
    """Each instance is a WorkAgent on one device."""
    devices, count = given.get(f"{_BACKEND}npuDeviceIds"), given.get(f"{_BACKEND}modelInstanceNumber", 1)
    if not isinstance(count, int) or not 1 <= count <= 1024:
        raise ConfigError(f"{path}: {_BACKEND}modelInstanceNumber must be an integer >= 1. Given: {shorten(count)}")
    imported.values["serving_config.agent_ports"] = [FIRST_AGENT_PORT + index for index in range(count)]
    if devices is None:
        return
    groups = devices if isinstance(devices, list) else []
    if not groups or not all(isinstance(group, list) and group for group in groups):
        raise ConfigError(f"{path}: {_BACKEND}npuDeviceIds must be a list of lists. Given: {shorten(devices)}")
    imported.values["serving_config.start_device_id"] = groups[0][0]
    if any(len(group) > 1 for group in groups):
        imported.notes.append(
            f"{_BACKEND}npuDeviceIds: {shorten(devices)} has several devices for an instance, and a WorkAgent computes "
            f"the whole model on one; more of them are further entries of serving_config.agent_ports"
        )
    elif [group[0] for group in groups] != list(range(groups[0][0], groups[0][0] + len(groups))):
        imported.notes.append(f"{_BACKEND}npuDeviceIds: {shorten(devices)} has gaps; WorkAgents take following devices")


def _take_certificates(given: Mapping[str, Any], imported: Imported) -> None:
    if given.get("ServerConfig.httpsEnabled") is not False:
        imported.notes.append(
            "ServerConfig.tlsPkPwd: MindIE's password files are encrypted by its own tool; "
            "serving_config.ssl_keyfile_password_file names one in plain text"
        )
        return
    for key in ("serving_config.ssl_certfile", "serving_config.ssl_keyfile"):
        imported.values.pop(key, None)


def _microseconds(value: Any) -> float:
    return float(value) / 1e6


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
_ORDER: Final = "has no counterpart; scheduler_config.order says who of a class goes next"

KEYS: Final[Mapping[str, Carried | Left]] = {
    "Version": Left(""),
    "LogConfig.logLevel": Carried("serving_config.log_level", _level),
    "ServerConfig.ipAddress": Carried("serving_config.server_ip"),
    "ServerConfig.port": Carried("serving_config.server_port"),
    "ServerConfig.maxLinkNum": Carried("serving_config.max_connections"),
    "ServerConfig.e2eTimeout": Carried("serving_config.max_timeout_s"),
    "ServerConfig.tokenTimeout": Carried("serving_config.step_timeout_s"),
    "ServerConfig.tlsCert": Carried("serving_config.ssl_certfile"),
    "ServerConfig.tlsPk": Carried("serving_config.ssl_keyfile"),
    "ServerConfig.tlsPkPwd": Left(""),
    "ServerConfig.httpsEnabled": Left(""),
    "ServerConfig.inferMode": Left("is not served: prompts and answers are computed in one place", ("standard",)),
    "ServerConfig.allowAllZeroIpListening": Left("has no counterpart: 0.0.0.0 is taken, with a notice"),
    "ServerConfig.fullTextEnabled": Left("is not served: streams tell what is new", (False,)),
    "ServerConfig.openAiSupport": Left("is not served", ("vllm", "openai")),
    f"{_BACKEND}backendName": Left(""),
    f"{_BACKEND}modelInstanceNumber": Left(""),
    f"{_BACKEND}npuDeviceIds": Left(""),
    f"{_BACKEND}tokenizerProcessNumber": Left("has no counterpart: the master tokenizes, long texts in threads"),
    f"{_BACKEND}multiNodesInferEnabled": Left("is not served: a WorkAgent computes on one device", (False,)),
    f"{_DEPLOY}maxSeqLen": Carried("model_config.max_generate_length"),
    f"{_DEPLOY}maxInputTokenLen": Carried("model_config.seq_length"),
    f"{_DEPLOY}truncation": Left("is up to each request: `truncate_prompt_tokens`", (False,)),
    f"{_MODEL}modelName": Carried("model_config.model_name"),
    f"{_MODEL}modelWeightPath": Carried("model_config.model_path"),
    f"{_MODEL}modelInstanceType": Left("is not served", ("Standard", "StandardMock")),
    f"{_MODEL}worldSize": Left("is not served: a WorkAgent computes the whole model on one device", (1,)),
    f"{_MODEL}cpuMemSize": Left("GB of the host for swapping: pa_config.num_swap_blocks counts blocks", (0,)),
    f"{_MODEL}npuMemSize": Left("GB of the cache: device_config.max_device_memory has weights and cache", (-1,)),
    f"{_MODEL}backendType": Left("has no counterpart: MindSpore computes", ("ms",)),
    f"{_MODEL}trustRemoteCode": Left("is not served: no code of a model folder is run", (False,)),
    f"{_SCHEDULE}templateType": Left(
        "is not served: prompts and answers are computed in one place", ("Standard", "Mix")
    ),
    f"{_SCHEDULE}templateName": Left(""),
    f"{_SCHEDULE}cacheBlockSize": Carried("pa_config.block_size"),
    f"{_SCHEDULE}maxPrefillBatchSize": Carried("model_config.prefill_batch_size"),
    f"{_SCHEDULE}maxPrefillTokens": Carried("scheduler_config.max_prefill_tokens"),
    f"{_SCHEDULE}prefillTimeMsPerReq": Carried("scheduler_config.prefill_time_ms_per_req"),
    f"{_SCHEDULE}decodeTimeMsPerReq": Carried("scheduler_config.decode_time_ms_per_req"),
    f"{_SCHEDULE}supportSelectBatch": Carried("scheduler_config.policy", _policy),
    f"{_SCHEDULE}prefillPolicyType": Left(_ORDER, (0,)),
    f"{_SCHEDULE}decodePolicyType": Left(_ORDER, (0,)),
    f"{_SCHEDULE}maxBatchSize": Carried("model_config.decode_batch_size"),
    f"{_SCHEDULE}maxIterTimes": Left("tokens of an answer at most: each request has its `max_tokens`"),
    f"{_SCHEDULE}maxPreemptCount": Left(
        "of a batch: scheduler_config.max_preemptions_per_request is that of a request"
    ),
    f"{_SCHEDULE}maxQueueDelayMicroseconds": Carried("model_config.batch_waiting_time", _microseconds),
    f"{_SCHEDULE}maxFirstTokenWaitTime": Left("ms to a first token: request_classes have bounds and promises"),
}
"""Dotted name -> what becomes of it."""
PREFIXES: Final[Mapping[str, str]] = {
    "LogConfig.": "has no counterpart: logs go to the standard error, `start` keeps them in its run folder",
    "ServerConfig.tls": "has no counterpart: clients show keys, not certificates (api_keys)",
    "ServerConfig.management": "has no counterpart: health and metrics are on the port of the server",
    "ServerConfig.metrics": "has no counterpart: /metrics is on the port of the server",
    "ServerConfig.kmc": "has no counterpart: nothing is encrypted by MindIE's tool",
    "ServerConfig.interComm": "has no counterpart: prompts and answers are computed in one place",
    f"{_BACKEND}interNode": "has no counterpart: a WorkAgent computes on one device",
    f"{_BACKEND}multiNodes": "has no counterpart: a WorkAgent computes on one device",
}
"""Beginning of names -> what becomes of all that begin so and stand nowhere else."""
