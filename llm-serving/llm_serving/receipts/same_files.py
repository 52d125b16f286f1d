"""That all WorkAgents of a server read the same model: any of them may go on with an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from llm_serving.config.sections.model import ModelConfig
from llm_serving.errors import ModelError
from llm_serving.models.weight_reader import sketch_of
from llm_serving.receipts.contents import FileState, served_weights
from llm_serving.transport.messages import Loaded


class Reads(Protocol):
    """As `WorkAgentProcess`."""

    machine: str
    loaded: Loaded

    def kill(self) -> None: ...


Agent = TypeVar("Agent", bound=Reads)


class SameFiles:
    """Of one server; from any thread. What the first WorkAgent has read decides; what is read on another machine is
    compared with what is here."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._first: tuple[FileState, ...] = ()
        self._sketch = ""
        """Of these files; empty: nobody has asked."""

    def read_by(self, start: Callable[[], Agent]) -> Agent:
        """The WorkAgent that is started; it is ended unless it has read what the first one had.

        Raises:
            ModelError: It was, or was not even started.
        """
        files = served_weights(self._model)
        self._check(files)
        agent = start()
        try:
            for each in files:
                each.check()
            with self._lock:
                self._first = self._first or files
                self._check(files)
                self._check_elsewhere(agent)
        except ModelError:
            agent.kill()
            raise
        return agent

    def _check_elsewhere(self, agent: Reads) -> None:
        if not agent.loaded.model:
            return
        path = self._model.model_path
        assert path is not None
        self._sketch = self._sketch or sketch_of(path)
        if agent.loaded.model != self._sketch:
            raise ModelError(
                f"{path}: is another model at {agent.machine} than on the master's machine: put the same files there, "
                f"or have them come with `cluster_config.weights: object_store`"
            )

    def _check(self, files: tuple[FileState, ...]) -> None:
        if self._first and files != self._first:
            path = min(each.path for each in {*files} ^ {*self._first})
            raise ModelError(
                f"{path}: is not what the first WorkAgent read, and answers would change in their middle: put that "
                f"back, or start the server again"
            )
