"""That all WorkAgents of a server read the same model: any of them may go on with an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from llm_serving.config.sections.model import ModelConfig
from llm_serving.errors import ModelError
from llm_serving.receipts.contents import FileState, served_weights


class Ends(Protocol):
    def kill(self) -> None: ...


Agent = TypeVar("Agent", bound=Ends)


class SameFiles:
    """Of one server; from any thread. What the first WorkAgent has read decides."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._first: tuple[FileState, ...] = ()

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
        except ModelError:
            agent.kill()
            raise
        return agent

    def _check(self, files: tuple[FileState, ...]) -> None:
        if self._first and files != self._first:
            path = min(each.path for each in {*files} ^ {*self._first})
            raise ModelError(
                f"{path}: is not what the first WorkAgent read, and answers would change in their middle: put that "
                f"back, or start the server again"
            )
