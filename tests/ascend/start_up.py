"""Starts a model on Ascend as a WorkAgent does, runs its warm-up, and prints what was found as JSON.

    python start_up.py [FOLDER] [--dtype float16] [--exactness exact] [--block-size 16]

Run in the environment that `cann_stubs.build` returns, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from llm_serving.core.process import DISABLED_KERNELS, set_mindspore_environment


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", help="of the model (default: the shipped one)")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--exactness", default="exact")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-device-memory", type=int, metavar="BYTES")
    parser.add_argument("--without-environment", action="store_true", help="leave out what the WorkAgent sets")
    parser.add_argument("--without-threads", action="store_true", help="leave the number of threads to MindSpore")
    parser.add_argument("--swiglu", action="store_true", help="call the primitive Swiglu directly")
    arguments = parser.parse_args()
    os.environ.pop(DISABLED_KERNELS, None)
    if not arguments.without_environment:
        set_mindspore_environment()
    import mindspore as ms
    import psutil
    from llm_serving.backends.ascend import AscendBackend
    from llm_serving.backends.cpu import CpuBackend
    from llm_serving.config.paths import DEMO_FOLDER
    from llm_serving.config.sections.device import DeviceConfig
    from llm_serving.models.weight_reader import check_folder
    from llm_serving.worker.device import backend_for, configure_device, free_npu_memory
    from llm_serving.worker.model_runner import ModelRunner

    if arguments.swiglu:
        AscendBackend.swiglu = CpuBackend.swiglu  # type: ignore[method-assign, assignment]
    if arguments.without_threads:
        ms.runtime.dispatch_threads_num = lambda number: None
    memory = arguments.max_device_memory
    device = DeviceConfig(device_target="Ascend", exactness=arguments.exactness, max_device_memory=memory)
    configure_device(device)
    free = free_npu_memory()
    backend, notice = backend_for(device, arguments.dtype)
    folder = arguments.folder or DEMO_FOLDER
    num_prompt_rows = 4 if arguments.exactness == "fast" else 0
    before = psutil.Process().memory_info().rss
    runner = ModelRunner(
        check_folder(folder), folder, backend, 8192, arguments.block_size, 1024, num_prompt_rows=num_prompt_rows
    )
    held = psutil.Process().memory_info().rss - before
    runner.warm_up()
    cache_bytes = runner.kv_tensors.num_blocks * runner.kv_tensors.block_bytes
    found = {"backend": backend.name, "notice": notice, "free": free, "cache": cache_bytes, "held": held}
    sys.stdout.write(f"\n{json.dumps(found)}\n")  # MindSpore prints texts without an end of line


if __name__ == "__main__":
    main()
