"""Faults of a device, injected into the processes that compute a model.

Python imports this file at its start if its folder is in `PYTHONPATH`. `INJECTED_FAULTS` names the faults, separated by
spaces. Processes that compute no model are not changed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

VARIABLE = "INJECTED_FAULTS"
COMPUTING = ("llm_serving.work_agent", "acceptance.device.precision")
RUNNER = "llm_serving.worker.model_runner"
SEEN = 256
"""Tokens of a context that a decode step of the fault `decode_window` attends to."""


def change_inputs(runner: Any, change: Callable[[Any, int], Any]) -> None:
    """Pass the arguments of each step through `change(inputs, block_size)`."""
    build = runner.build_model_inputs
    runner.build_model_inputs = lambda step, previous, limits: change(build(step, previous, limits), limits.block_size)


def before_each_step(runner: Any, call: Callable[[Any], None]) -> None:
    start = runner.ModelRunner.start

    def changed(self: Any, step: Any, *rest: Any) -> Any:
        call(step)
        return start(self, step, *rest)

    runner.ModelRunner.start = changed


def attention_scale(runner: Any) -> None:
    """Attention in bfloat16 multiplies scores by a fifth of its scale."""
    from llm_serving.backends.ascend import AscendBackend

    attention = AscendBackend.paged_attention

    def changed(self: Any, shape: Any, *rest: Any) -> Any:
        return attention(self, replace(shape, scale=shape.scale * (0.2 if self.dtype == "bfloat16" else 1.0)), *rest)

    AscendBackend.paged_attention = changed  # type: ignore[method-assign]


def slow_steps(runner: Any) -> None:
    """Each decode step takes 0.3 s longer."""
    before_each_step(runner, lambda step: time.sleep(0.3 * (len(step.token_ids) == len(step.query_lens))))


def decode_window(runner: Any) -> None:
    """A decode step attends to the last 256 tokens of a longer context."""

    def change(inputs: Any, block_size: int) -> Any:
        tables, lens = inputs.block_tables.copy(), inputs.context_lens.copy()
        for row in range(inputs.num_rows):
            if inputs.query_lens[row] == 1 and lens[row] > SEEN:
                first = -(-(lens[row] - SEEN) // block_size)
                tables[row, : tables.shape[1] - first] = tables[row, first:].copy()
                lens[row] -= first * block_size
        return replace(inputs, block_tables=tables, context_lens=lens)

    change_inputs(runner, change)


def mixed_rows(runner: Any) -> None:
    """From the 17th request of a step on, requests read the blocks of the first."""

    def change(inputs: Any, block_size: int) -> Any:
        tables = inputs.block_tables.copy()
        tables[16:] = tables[0]
        return replace(inputs, block_tables=tables)

    change_inputs(runner, change)


def wrong_positions(runner: Any) -> None:
    """Positions from 512 on are rotated as position 512."""

    def change(inputs: Any, block_size: int) -> Any:
        return replace(inputs, positions=inputs.positions.clip(max=512))

    change_inputs(runner, change)


def lost_slots(runner: Any) -> None:
    """The key and value of the last token of each block are not written."""

    def change(inputs: Any, block_size: int) -> Any:
        slots = inputs.slot_mapping.copy()
        slots[slots % block_size == block_size - 1] -= 1
        return replace(inputs, slot_mapping=slots)

    change_inputs(runner, change)


def slow_prompts(runner: Any) -> None:
    """Each token of a prompt takes 2 ms longer."""
    before_each_step(runner, lambda step: time.sleep(0.002 * (len(step.token_ids) - len(step.query_lens))))


def crash(runner: Any) -> None:
    """The device crashes the process of the model qwen3."""
    if "qwen3" in sys.orig_argv:
        before_each_step(runner, lambda step: os.kill(os.getpid(), signal.SIGSEGV))


class _AfterImport(MetaPathFinder, Loader):
    """Calls a function with a module after it is imported."""

    def __init__(self, name: str, call: Callable[[ModuleType], object]) -> None:
        self._name, self._call = name, call
        self._loader: Loader | None = None

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        self._loader.exec_module(module)
        self._call(module)


FAULTS: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        *(attention_scale, slow_steps, decode_window),
        *(mixed_rows, wrong_positions, lost_slots, slow_prompts, crash),
    )
}
if any(each in sys.orig_argv for each in COMPUTING):
    faults = [FAULTS[name] for name in os.environ.get(VARIABLE, "").split()]
    sys.meta_path.insert(0, _AfterImport(RUNNER, lambda runner: [fault(runner) for fault in faults]))
