"""Steps that a device computes while the host prepares the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from llm_serving.backends.parameters import is_on_npu
from llm_serving.core.step import Int32Array, StepOutput


class HostCopy:
    """A copy of a tensor to the host. Waiting for it does not include work that was submitted to the device later."""

    def __init__(self, tensor: ms.Tensor) -> None:
        self._event: ms.runtime.Event | None = None
        if is_on_npu():
            tensor = tensor.to("CPU", non_blocking=True)
            self._event = ms.runtime.Event()
            self._event.record()
        self._tensor = tensor

    @property
    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def array(self) -> NDArray[Any]:
        if self._event is not None:
            self._event.synchronize()
        copied: NDArray[Any] = self._tensor.asnumpy()
        return copied


class StartedStep:
    """A step that was submitted to the device."""

    def __init__(
        self,
        copy: HostCopy,
        finish: Callable[[NDArray[Any]], StepOutput],
        num_samples: int,
        *,
        keeps_tokens: bool = False,
    ) -> None:
        """`finish`: makes the output from the copy. `keeps_tokens`: whether the samples stay on the device."""
        self._pending: tuple[HostCopy, Callable[[NDArray[Any]], StepOutput]] | None = (copy, finish)
        self.placeholders: Int32Array = np.zeros(num_samples, np.int32)
        """Valid token ids that stand for the samples until these are known."""
        self.keeps_tokens = keeps_tokens
        """Whether the token graph keeps the samples on the device for the next step."""
        self._output: StepOutput | None = None

    @property
    def is_done(self) -> bool:
        """Whether `output` would return without waiting for the device."""
        return self._pending is None or self._pending[0].is_done

    def output(self) -> StepOutput:
        """Wait for the step and return its results. Raise errors of the device and of sampling."""
        if self._pending is not None:
            copy, finish = self._pending
            self._output = finish(copy.array())
            self._pending = None  # frees the step before, and memory of the device
        assert self._output is not None
        return self._output
