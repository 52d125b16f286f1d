"""Rules of `cluster_config`."""

from __future__ import annotations

from typing import Final

from llm_serving.config.values import DEFAULTS, Values
from llm_serving.core.choices import EngineName

SECTION: Final = "cluster_config"
SECRET_FILE: Final = f"{SECTION}.secret_file"
_OF_RAY: Final = ("address", "cpus_per_replica", "placement", "master_host", "secret_file")


def check_cluster(values: Values) -> None:
    """Refuses keys that would mean nothing, and a cluster of several machines without a secret.

    Raises:
        ConfigError: As said.
    """
    if values[f"{SECTION}.engine"] == EngineName.LOCAL:
        for key in _OF_RAY:
            name = f"{SECTION}.{key}"
            if values[name] != DEFAULTS[name]:
                raise values.error(name, f"must come with `{SECTION}.engine: ray`", values[name])
    elif values[f"{SECTION}.address"] is not None and values[SECRET_FILE] is None:
        name = f"{SECTION}.address"
        raise values.error(
            name, f"must come with `{SECTION}.secret_file`, whose content all machines have", values[name]
        )
