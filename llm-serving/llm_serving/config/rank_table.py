"""Rank tables of HCCL (`cluster_config.rank_table_file`): JSON files with the devices of ranks and their addresses."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any, NamedTuple

from llm_serving.errors import ConfigError

VERSIONS = ("1.0", "1.2")
"""Values of `version`: for an Atlas A2, and for an A3, whose devices also have a `super_device_id`."""


class RankDevice(NamedTuple):
    rank: int
    device: int
    """Index of the device on its machine."""


def read_rank_table(path: Path) -> list[RankDevice]:
    """Return the ranks of a rank table by their number. Raise ConfigError with the field, the rule and the value if
    HCCL would not accept the table, or if it names several machines, on which a replica cannot run.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} must be a rank table of HCCL in JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must be a rank table of HCCL, a JSON object. Given: {str(table)[:100]}")
    if table.get("version") not in VERSIONS:
        raise _error(path, "version", f"must be {' or '.join(VERSIONS)}", table.get("version"))
    if table.get("status") != "completed":
        raise _error(path, "status", "must be completed", table.get("status"))
    servers = table.get("server_list")
    if not isinstance(servers, list) or len(servers) != 1 or not isinstance(servers[0], dict):
        given = f"{len(servers)} machines" if isinstance(servers, list) else servers
        raise _error(path, "server_list", "must have one machine: all ranks of a replica run on it", given)
    if str(table.get("server_count")) != "1":
        raise _error(path, "server_count", "must be 1, the length of server_list", table.get("server_count"))
    devices = servers[0].get("device")
    if not isinstance(devices, list) or not all(isinstance(each, dict) for each in devices):
        raise _error(path, "server_list[0].device", "must be a list of devices", devices)
    found = sorted(_device(path, f"server_list[0].device[{index}]", each) for index, each in enumerate(devices))
    ranks = [each.rank for each in found]
    if ranks != list(range(len(ranks))):
        raise _error(path, "rank_id", f"must be 0 to {len(ranks) - 1}, each once", ranks)
    if len({each.device for each in found}) < len(found):
        raise _error(path, "device_id", "must differ from rank to rank", [each.device for each in found])
    return found


def _device(path: Path, place: str, device: dict[str, Any]) -> RankDevice:
    numbers = [_number(path, f"{place}.{field}", device.get(field)) for field in ("rank_id", "device_id")]
    address = device.get("device_ip")
    try:
        ipaddress.ip_address(address if isinstance(address, str) else "")
    except ValueError:
        raise _error(path, f"{place}.device_ip", "must be the IP address of the device", address) from None
    return RankDevice(*numbers)


def _number(path: Path, field: str, value: Any) -> int:
    """Return a number that the table holds as a string."""
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).isdecimal():
        raise _error(path, field, "must be a whole number, at least 0", value)
    return int(value)


def _error(path: Path, field: str, rule: str, value: Any) -> ConfigError:
    return ConfigError(f"{path}: `{field}` {rule}. Given: {value}")
