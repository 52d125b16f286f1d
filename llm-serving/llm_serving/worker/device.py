"""Device settings of this process, the choice of the backend, and its guarantee about the bits of an answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import mindspore as ms

from llm_serving.backends import Backend, create_backend
from llm_serving.config.sections.device import DeviceConfig
from llm_serving.core.enums import ExactnessName
from llm_serving.core.process import DETERMINISTIC
from llm_serving.errors import ConfigError, KernelError
from llm_serving.log import get_logger
from llm_serving.models.memory import NPU_RESERVE

logger = get_logger(__name__)


_UNSUPPORTED_SOC = "310p"
_DISPATCH_THREADS = 5
"""Number of threads with which MindSpore dispatches kernels to an NPU: its documented default. Without this setting,
MindSpore uses fewer threads on a machine with up to 16 cores, and then rejects PagedAttention ("Invalid shape")."""


def configure_device(device: DeviceConfig, device_id: int = 0) -> None:
    """Set this process's device and graph mode, before its first operator. Raise ConfigError for an unknown NPU."""
    on_ascend = device.device_target == "Ascend"
    ms.set_device(device.device_target, device_id if on_ascend else 0)
    if on_ascend:
        _refuse_soc(_soc_version())
        if device.exactness == ExactnessName.EXACT:
            os.environ.update(DETERMINISTIC)
        ms.runtime.dispatch_threads_num(_DISPATCH_THREADS)
        if device.max_device_memory is not None:
            limit = npu_memory_limit(device.max_device_memory, free_npu_memory())
            if limit >= NPU_RESERVE:  # with less no model fits; sizing the cache raises that error
                ms.runtime.set_memory(max_size=f"{limit * 100 // 2**30 / 100:.2f}GB")  # rounded down
    ms.set_context(mode=ms.GRAPH_MODE, jit_config=_jit_config(device))
    if device.save_graphs:
        ms.set_context(save_graphs=True, save_graphs_path=str(device.save_graphs_path))
    if device.graph_kernel_flags:
        os.environ["MS_DEV_GRAPH_KERNEL_FLAGS"] = device.graph_kernel_flags


def free_npu_memory() -> int:
    """Return the free bytes of the NPU that `configure_device` selected, as CANN reports them."""
    return int(ms.hal.get_device_properties(0, "Ascend").free_memory)  # the id is ignored


def npu_memory_limit(max_device_memory: int, free: int) -> int:
    """Return the bytes that a WorkAgent may use of `free` bytes (0: unknown) on its NPU. A limit above them is lowered,
    as YAMLs for older servers expect.
    """
    return min(max_device_memory, max(free - NPU_RESERVE, 0)) if free > 0 else max_device_memory


def _jit_config(device: DeviceConfig) -> dict[str, str]:
    """Return settings of the graph compiler. On Ascend, PagedAttention needs infer boost, which needs level O0."""
    if device.device_target == "Ascend":
        return {"jit_level": "O0", "infer_boost": "on"}
    # Level O1 is level O0 with operator fusion.
    fuses = device.enable_graph_kernel and device.jit_level == "O0"
    return {"jit_level": "O1" if fuses else device.jit_level}


def _soc_version() -> str:
    """Return the name of the NPU's chip, such as "ascend910b"; empty: MindSpore does not report it."""
    try:
        from mindspore._c_expression import MSContext

        return str(MSContext.get_instance().get_ascend_soc_version()).lower()
    except (ImportError, AttributeError, RuntimeError):
        return ""


def _refuse_soc(version: str) -> None:
    if _UNSUPPORTED_SOC in version:
        raise ConfigError(
            "`device_config.device_target` must be an NPU whose PagedAttention takes caches in the format ND, as the "
            f"Atlas A2 and A3 series do; 310P takes NZ. Given: {version}"
        )


def backend_for(device: DeviceConfig, dtype: str, *, is_native: bool = True) -> tuple[Backend, str]:
    """Return the backend for `device_target` and `kernels`, and a notice, usually empty: the operator library is
    missing, or the device cannot guarantee `exactness: exact`. `is_native`: False for MindFormers' networks, which have
    their own matrix products. Raise KernelError if `kernels` requires the library and it cannot be built or loaded.
    """
    if device.device_target != "CPU":
        return _on_ascend(device, dtype, is_native)
    if device.kernels == "plain":
        return create_backend("plain", dtype), ""
    try:
        return create_backend("cpu", dtype), ""
    except KernelError as error:
        if device.kernels != "auto":
            raise
        notice = f"no operator library, MindSpore's own operations serve, many times slower: {error}"
        logger.warning("%s", notice)
        return create_backend("plain", dtype), notice


def _on_ascend(device: DeviceConfig, dtype: str, is_native: bool) -> tuple[Backend, str]:
    if device.exactness == ExactnessName.FAST:
        return create_backend("ascend_fast", dtype), ""
    if not is_native:
        return create_backend("ascend", dtype), ATTENTION_SPLITS
    try:
        return create_backend("ascend_invariant", dtype), ""
    except KernelError as error:
        reason = f"products may add in another order in another batch: {error}"
        logger.warning("%s", reason)
        return create_backend("ascend", dtype), f"{ATTENTION_SPLITS}; {reason}"


_BIT_IDENTICAL: Final = "the same request gets the same bytes, whatever runs beside it"
_OWN_PRODUCTS: Final = "products are MindSpore's own, which may order their sums by the shape of a batch"
_ROW_ALONE: Final = (
    "each token is a row of PagedAttention whose plan does not depend on other rows, products are batch-invariant, and "
    "ranks add in their order; this follows from MindSpore 2.10's tiling and was not verified on a device"
)
ATTENTION_SPLITS: Final = (
    "bit-identical answers are not guaranteed on Ascend: PagedAttention may split the keys of a row over the cores, "
    "and chooses the split by the shape of the whole batch, so the last bits of an answer depend on the requests "
    "beside it"
)
"""Source: the tiling of MindSpore 2.10's kernels, which splits a row in a batch differently from the same row alone."""

GUARANTEES: Final[Mapping[tuple[ExactnessName, str], str]] = {
    (ExactnessName.EXACT, "cpu"): _BIT_IDENTICAL,
    (ExactnessName.FAST, "cpu"): f"{_BIT_IDENTICAL}: both kernels of attention add in one order here",
    (ExactnessName.EXACT, "plain"): f"the last bits of an answer are not guaranteed: {_OWN_PRODUCTS}",
    (ExactnessName.EXACT, "ascend_invariant"): f"{_BIT_IDENTICAL}: {_ROW_ALONE}",
    (ExactnessName.EXACT, "ascend"): f"{ATTENTION_SPLITS}; {_OWN_PRODUCTS}",
    (ExactnessName.FAST, "ascend_fast"): (
        "the last bits of an answer depend on the requests that share a step with its prompt: FlashAttentionScore "
        f"computes steps of whole prompts, PagedAttention the others, and {_OWN_PRODUCTS}"
    ),
}


OF_EXPERTS: Final = (
    "bit-identical answers are not guaranteed on Ascend: GroupedMatmulV4 multiplies experts, and may order its sums by "
    "how many rows an expert has"
)
"""The guarantee for experts in the model dtype. Products of 8-bit experts are exact."""


def guarantee(exactness: str, backend_name: str, has_experts: bool = False) -> str:
    """Return a text that says what answers depend on. `has_experts`: the model has experts of more than 8 bits."""
    if has_experts and backend_name == "ascend_invariant":
        return OF_EXPERTS
    return GUARANTEES[ExactnessName(exactness), backend_name]


_BLOCKS_JOINED: Final = (64, 128)
"""Block sizes for which PagedAttention's order of sums depends on other rows: it takes 256 keys of a row at a time if
any context of the step has 256 tokens, and 128 otherwise."""


def check_block_size(attention_rows: int, block_size: int) -> None:
    """Raise ConfigError if PagedAttention's order of sums depends on other rows with this block size."""
    if attention_rows and block_size in _BLOCKS_JOINED:
        raise ConfigError(
            "`pa_config.block_size` must be 16 or 32 with `device_config.exactness: exact` on Ascend: with 64 or 128, "
            "PagedAttention adds the keys of a row in another order as soon as any context of the step has 256 tokens. "
            f"Set one of these sizes, or `exactness: fast`. Given: {block_size}"
        )
