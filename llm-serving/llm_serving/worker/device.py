"""Device settings of this process and the choice of the backend."""

from __future__ import annotations

import os
import tempfile

import mindspore as ms

from llm_serving.backends import Backend, create_backend
from llm_serving.config.sections.device import DeviceConfig
from llm_serving.core.enums import ExactnessName
from llm_serving.core.process import DETERMINISTIC
from llm_serving.errors import ConfigError, KernelError
from llm_serving.log import get_logger
from llm_serving.models.memory import NPU_RESERVE
from llm_serving.worker.exactness import ATTENTION_SPLITS

logger = get_logger(__name__)


_UNSUPPORTED_SOC = "310p"
_DISPATCH_THREADS = 5
"""Threads that dispatch kernels to an NPU: MindSpore's default. With fewer, MindSpore may reject PagedAttention."""


def configure_device(device: DeviceConfig, device_id: int = 0) -> None:
    """Set this process's device and graph mode, before its first operator. Raise ConfigError for an unknown NPU."""
    on_ascend = device.device_target == "Ascend"
    if on_ascend:
        _redirect_offload_folder()
    ms.set_device(device.device_target, device_id if on_ascend else 0)
    if on_ascend:
        _refuse_soc(_soc_version())
        if device.exactness == ExactnessName.EXACT:
            os.environ.update(DETERMINISTIC)
        ms.runtime.dispatch_threads_num(_DISPATCH_THREADS)
        if device.max_device_memory is not None:
            limit = npu_memory_limit(device.max_device_memory, free_npu_memory())
            if limit >= NPU_RESERVE:  # with less memory, no model fits, and sizing the cache fails
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
    """Return the bytes that a WorkAgent may use on its NPU: `max_device_memory`, at most `free` - `NPU_RESERVE`. `free`
    is 0 if unknown. A limit that is too high is no error, because YAML files for older servers expect that.
    """
    return min(max_device_memory, max(free - NPU_RESERVE, 0)) if free > 0 else max_device_memory


def _jit_config(device: DeviceConfig) -> dict[str, str]:
    """Return graph compiler settings. On Ascend, PagedAttention needs infer boost, which supports only level O0."""
    if device.device_target == "Ascend":
        return {"jit_level": "O0", "infer_boost": "on"}
    # Level O1 is level O0 with operator fusion.
    fuses = device.enable_graph_kernel and device.jit_level == "O0"
    return {"jit_level": "O1" if fuses else device.jit_level}


def _soc_version() -> str:
    """Return the name of the NPU's chip, such as "ascend910b", or an empty text if MindSpore does not report it."""
    try:
        from mindspore._c_expression import MSContext

        return str(MSContext.get_instance().get_ascend_soc_version()).lower()
    except (ImportError, AttributeError, RuntimeError):
        return ""


def _redirect_offload_folder() -> None:
    """Set MindSpore's offload path to the system's temporary folder. On an NPU, MindSpore creates its offload folder at
    the start, by default `offload` in the current directory. This server lets MindSpore swap no tensors, so MindSpore
    writes no file there.
    """
    try:
        from mindspore._c_expression import OffloadContext

        OffloadContext.get_instance().set_offload_path(tempfile.gettempdir())
    except (ImportError, AttributeError):  # this release has no such class: MindSpore creates the folder
        return


def _refuse_soc(version: str) -> None:
    if _UNSUPPORTED_SOC in version:
        raise ConfigError(
            "`device_config.device_target` must be an NPU whose PagedAttention takes caches in the format ND, as the "
            f"Atlas A2 and A3 series do; 310P takes NZ. Given: {version}"
        )


def backend_for(device: DeviceConfig, dtype: str, *, is_native: bool = True) -> tuple[Backend, str]:
    """Return the backend for `device_target` and `kernels`, and a warning. The warning is empty unless the library of
    CPU kernels is missing, or the device cannot guarantee `exactness: exact`. `is_native` is False for MindFormers'
    networks, which have their own matrix products. Raise KernelError if `kernels` requires the library and it cannot be
    built or loaded.
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
        notice = f"without the operator library, MindSpore's own operations are used, many times slower: {error}"
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
        reason = f"the order of the sums in matrix products may depend on the batch: {error}"
        logger.warning("%s", reason)
        return create_backend("ascend", dtype), f"{ATTENTION_SPLITS}; {reason}"
