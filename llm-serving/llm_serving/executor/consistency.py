"""Check that all WorkAgents of a server give bit-identical answers, whichever of them serves a request."""

from __future__ import annotations

import threading

from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.supervisor import WorkAgentProcess


class ConsistencyCheck:
    """Compares the compute fingerprint of every WorkAgent with that of the first one loaded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reference: tuple[int, ComputeFingerprint] | None = None

    def check(self, agent: WorkAgentProcess) -> WorkAgentProcess:
        """Return the WorkAgent; kill it and raise WorkerDiedError if its fingerprint differs."""
        with self._lock:
            if self._reference is None:
                self._reference = agent.index, agent.loaded.compute_fingerprint
            first, wanted = self._reference
        found = agent.loaded.compute_fingerprint
        if found == wanted:
            return agent
        agent.kill()
        names = ", ".join(
            f"{name} {ours} and {theirs}"
            for name in ComputeFingerprint.__struct_fields__
            if (ours := getattr(found, name)) != (theirs := getattr(wanted, name))
        )
        raise WorkerDiedError(f"WorkAgent {agent.index} would give other answers than WorkAgent {first}: {names}")
