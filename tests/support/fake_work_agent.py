"""A real WorkAgent process with a fake model. Run it as `python FILE -m llm_serving.work_agent ARGUMENTS`."""

from __future__ import annotations

import signal
import sys
import types
from typing import Any

from llm_serving.errors import ConfigError
from support.fake_runner import FakeRunner, FakeTransferPool

NEVER_LOADED = 7
"""Device id whose WorkAgent never finishes loading."""


def load_runner(
    settings: Any,
    on_progress: Any,
    ranks_fd: int | None = None,
    transfer_fd: int | None = None,
    group_port: int = 0,
) -> tuple[FakeRunner, str]:
    on_progress(f"compiling for {settings.device.device_target}")
    if settings.device_id == NEVER_LOADED:
        signal.pause()
    if settings.pa.num_blocks == 1:
        raise ConfigError("pa_config.num_blocks: must be at least 2. Given: 1")
    runner: Any = FakeRunner(8, 4, settings.pa.num_swap_blocks)
    runner.num_compilations = 1
    runner.kv_tensors = types.SimpleNamespace(
        num_blocks=8,
        num_swap_blocks=settings.pa.num_swap_blocks,
        block_bytes=16,
        transfer=None if transfer_fd is None else FakeTransferPool(settings.num_transfer_blocks),
    )
    return runner, ""


if __name__ == "__main__":
    loading: Any = types.ModuleType("llm_serving.worker.loading")
    loading.load_runner = load_runner
    model_runner: Any = types.ModuleType("llm_serving.worker.model_runner")
    model_runner.ModelRunner = FakeRunner
    started_step: Any = types.ModuleType("llm_serving.worker.token_graph")
    started_step.StartedStep = type("StartedStep", (), {})
    # the real modules would import MindSpore
    sys.modules |= {module.__name__: module for module in (loading, model_runner, started_step)}

    from llm_serving.work_agent import main

    assert "mindspore" not in sys.modules, "importing it takes seconds of every test that starts this process"
    sys.exit(main(sys.argv[3:]))
