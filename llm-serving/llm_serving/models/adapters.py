"""Checks that a model can use an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llm_serving.errors import ModelError
from llm_serving.formats.peft import WEIGHTS_NAME, PeftAdapter
from llm_serving.network.adapters import AdaptedLinear


class AdapterLimits(NamedTuple):
    """Number of adapter slots, and the highest rank of an adapter."""

    max_loras: int
    max_rank: int


def check_adapter(
    adapter: PeftAdapter, linears: Sequence[AdaptedLinear], experts: Sequence[str], max_rank: int
) -> None:
    """Raise ModelError unless the network can apply each module of an adapter, and the adapter has matrices for each
    module that its configuration names.
    """
    path, config = adapter.folder / WEIGHTS_NAME, adapter.config
    if config.max_rank > max_rank:
        raise ModelError(
            f"{config.path}: `r` must be at most {max_rank} (lora_config.max_lora_rank). Given: {config.max_rank}"
        )
    slots = {name: linear for linear in linears for name in linear.modules}
    for module, change in adapter.modules.items():
        if module in experts:
            raise ModelError(f"{path}: adapters of experts and routers are not supported. Found: {module}")
        if module not in slots:
            known = sorted({name.rpartition(".")[2] for name in slots})
            raise ModelError(
                f"{path}: the model has no linear layer {module} that an adapter can change. It has: {', '.join(known)}"
            )
        rows, columns = slots[module].stored_shape(module)
        for part, axis, wanted in (("A", 1, columns), ("B", 0, rows)):
            shape = (change.a if part == "A" else change.b).shape
            if shape[axis] != wanted:
                rule = f"must have {wanted} {'rows' if axis == 0 else 'columns'}, as in the model"
                raise ModelError(f"{path}: {module}.lora_{part}.weight {rule}. Found: shape {list(shape)}")
    if isinstance(config.targets, str) or config.is_partial:
        return
    for module in slots:
        if config.targets_module(module) and module not in adapter.modules:
            raise ModelError(
                f"{path}: must have matrices of {module}, which `target_modules` of {config.path.name} names"
            )
