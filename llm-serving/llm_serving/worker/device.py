"""The device of this process: MindSpore's settings, and the backend that computes on it."""

from __future__ import annotations

import os

import mindspore as ms

from llm_serving.backends import Backend, create_backend
from llm_serving.config.schema import DeviceConfig
from llm_serving.errors import KernelError
from llm_serving.log import get_logger

logger = get_logger(__name__)


def configure_device(device: DeviceConfig, device_id: int = 0) -> None:
    """Selects the device and graph mode for the whole process, before the first operator.

    Args:
        device: Section `device_config`.
        device_id: Index of the device; a CPU has only one.
    """
    ms.set_device(device.device_target, device_id if device.device_target != "CPU" else 0)
    # MindSpore's fusion of operators is what distinguishes level O1 from O0.
    fuses = device.enable_graph_kernel and device.jit_level == "O0"
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O1" if fuses else device.jit_level})
    if device.save_graphs:
        ms.set_context(save_graphs=True, save_graphs_path=str(device.save_graphs_path))
    if device.graph_kernel_flags:
        os.environ["MS_DEV_GRAPH_KERNEL_FLAGS"] = device.graph_kernel_flags


def backend_for(device: DeviceConfig, dtype: str) -> tuple[Backend, str]:
    """The backend that `device_target` and `kernels` ask for.

    Args:
        device: Section `device_config`.
        dtype: Type of weights, activations and KV cache.

    Returns:
        The backend, and a notice for the operator where MindSpore's own operations had to take the library's place.

    Raises:
        KernelError: `kernels` asks for the operator library, which cannot be built or loaded.
    """
    if device.device_target != "CPU":
        return create_backend("ascend", dtype), ""
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
