"""That all WorkAgents of a server compute the same bits, so that it does not matter which of them answers."""

from __future__ import annotations

import threading

from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.supervisor import WorkAgentProcess


class SameBits:
    """Of one server; from any thread. The first WorkAgent that loads decides."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: tuple[int, ComputeFingerprint] | None = None

    def agreed(self, agent: WorkAgentProcess) -> WorkAgentProcess:
        """The WorkAgent, unless it computes otherwise than the first: then it is ended.

        Raises:
            WorkerDiedError: It was.
        """
        with self._lock:
            if self._first is None:
                self._first = agent.index, agent.loaded.computed_by
            first, wanted = self._first
        found = agent.loaded.computed_by
        if found == wanted:
            return agent
        agent.kill()
        names = ", ".join(
            f"{name} {ours} and {theirs}"
            for name in ComputeFingerprint.__struct_fields__
            if (ours := getattr(found, name)) != (theirs := getattr(wanted, name))
        )
        raise WorkerDiedError(f"WorkAgent {agent.index} would give other answers than WorkAgent {first}: {names}")
