"""Rules of `cluster_config`."""

from __future__ import annotations

from typing import Final

from llm_serving.config.values import DEFAULTS, Values
from llm_serving.core.enums import EngineName, ImplementationName, RoleName, WeightsName
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import ModelSpec
from llm_serving.network.sharding import rule_against

SECTION: Final = "cluster_config"
SECRET_FILE: Final = f"{SECTION}.secret_file"
TENSOR_PARALLEL: Final = f"{SECTION}.tensor_parallel"
CPUS: Final = f"{SECTION}.cpus_per_replica"
WEIGHTS: Final = f"{SECTION}.weights"
WEIGHTS_CACHE: Final = f"{SECTION}.weights_cache_path"
ROLES: Final = f"{SECTION}.roles"
TRANSFER_BLOCKS: Final = f"{SECTION}.num_transfer_blocks"
_ONLY_ALONE: Final = (
    ("model_config.mindir_path", None, "graphs in files are those of one process"),
    ("model_config.implementation", ImplementationName.NATIVE, "MindFormers' networks are those of one process"),
)
"""Key, the value that it must have for several ranks, and why."""
_FOR_ROLES: Final = (
    (TENSOR_PARALLEL, 1, "ranks hand no blocks over"),
    ("model_config.mindir_path", None, "caches inside a graph are out of reach"),
    ("model_config.batching_strategy", "continuous", "a static batch ends where it began"),
)
"""Key, the value that it must have for requests to move, and why."""
_OF_RAY: Final = (
    *("address", "cpus_per_replica", "placement", "weights", "weights_cache_path", "master_host", "secret_file"),
)
_OUTSIDE: Final = ("model_config.mindir_path", "scheduler_config.draft_model_path")
"""Keys of what is not in the model's folder, and so does not come with it."""


def check_cluster(values: Values, spec: ModelSpec | None) -> None:
    """Refuses keys that would mean nothing, a cluster of several machines without a secret, and ranks that cannot be.

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
    _check_weights(values)
    if values[TENSOR_PARALLEL] > 1:
        _check_ranks(values, spec)
    _check_roles(values)


def _check_weights(values: Values) -> None:
    if values[WEIGHTS] == WeightsName.PATH:
        if values[WEIGHTS_CACHE] is not None:
            rule = f"must come with `{WEIGHTS}: object_store`"
            raise values.error(WEIGHTS_CACHE, rule, values[WEIGHTS_CACHE])
        return
    model = values["model_config.model_path"]
    if model is not None and is_gguf(model):
        raise values.error(WEIGHTS, "must be path with a model that is a GGUF file: folders are sent", values[WEIGHTS])
    for name in _OUTSIDE:
        if values[name] is not None:
            raise values.error(WEIGHTS, f"must be path with `{name}`, which lies outside the model", values[WEIGHTS])


def _check_roles(values: Values) -> None:
    roles, num_blocks = values[ROLES], values[TRANSFER_BLOCKS]
    if RoleName.PREFILL not in (roles or ()) and num_blocks is not None:
        raise values.error(TRANSFER_BLOCKS, f"must come with a replica of `{ROLES}` that is prefill", num_blocks)
    if roles is None:
        return
    given = ", ".join(roles)
    num_replicas = values[f"{SECTION}.replicas"] or len(values["serving_config.agent_ports"])
    if len(roles) != num_replicas:
        raise values.error(ROLES, f"must name one role for each of {num_replicas} replicas", given)
    if set(roles) == {RoleName.BOTH}:
        return
    if RoleName.PREFILL not in roles:
        raise values.error(ROLES, "must have a prefill where it has a decode: nothing would move there", given)
    if set(roles) == {RoleName.PREFILL}:
        raise values.error(ROLES, "must have a decode or both where it has a prefill", given)
    for name, needed, why in _FOR_ROLES:
        if values[name] != needed:
            raise values.error(ROLES, f"must be both alone with `{name}: {values[name]}`: {why}", given)


def _check_ranks(values: Values, spec: ModelSpec | None) -> None:
    count = values[TENSOR_PARALLEL]
    for name, needed, why in _ONLY_ALONE:
        if values[name] != needed:
            raise values.error(TENSOR_PARALLEL, f"must be 1 with `{name}: {values[name]}`: {why}", count)
    cpus = values[CPUS]
    if cpus is not None and cpus < count:
        raise values.error(CPUS, f"must be at least {count}, a core for each rank of `{TENSOR_PARALLEL}`", cpus)
    if values["device_config.kernels"] == "plain":
        rule = "must be 1 with `device_config.kernels: plain`: MindSpore's own operations are computed by one process"
        raise values.error(TENSOR_PARALLEL, rule, count)
    if spec is None:
        return
    if spec.scheme is not None:
        rule = f"must be 1 for a model whose weights are quantised by {spec.scheme.described}"
        raise values.error(TENSOR_PARALLEL, rule, count)
    if (rule_found := rule_against(spec.network, count)) is not None:
        raise values.error(TENSOR_PARALLEL, rule_found, count)
