"""Whether requests are served, and what people should know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llm_serving.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineHealth:
    ready: bool
    """Whether at least one WorkAgent serves."""
    detail: str
    """For people: "ready", "WorkAgent 0: compiling the network", "no WorkAgent lives: ..."."""
    loading: bool = False
    """Whether a WorkAgent is still on its way, beside those that serve."""


def health_of(
    engines: Mapping[int, Engine], failures: Mapping[int, str], num_replicas: int, progress: str, max_restarts: int
) -> EngineHealth:
    """What is to be told of the replicas of a server.

    Args:
        engines: By index, those that have been loaded, dead ones included.
        failures: By index, why one could not be loaded the last time.
        num_replicas: That there shall be.
        progress: Of what is being loaded.
        max_restarts: Of a WorkAgent in a row, after which it is told that they go on and on.
    """
    failed = {**failures, **{index: engine.dead for index, engine in engines.items() if engine.dead is not None}}
    restarting = {
        index: engine.away or f"is started again: {engine.restarting}"
        for index, engine in engines.items()
        if engine.restarting is not None and engine.dead is None
    }
    used_up = any(engines[index].used_up for index in restarting)
    ready = any(engine.dead is None and engine.restarting is None for engine in engines.values())
    loading = bool(restarting) or len(engines.keys() | failed.keys()) < num_replicas
    notices = {index: engine.notice for index, engine in engines.items() if engine.notice}
    lasting = f"was started again more than {max_restarts} times in a row without a step"
    notices |= {index: lasting for index, engine in engines.items() if engine.used_up}
    remarks = "; ".join(f"WorkAgent {index}: {remark}" for index, remark in sorted((notices | failed).items()))
    if not ready and not loading:
        return EngineHealth(False, f"no WorkAgent lives: {remarks}")
    if restarting and (ready or used_up):
        remarks = "; ".join(f"WorkAgent {index} {why}" for index, why in restarting.items())
        return EngineHealth(ready, remarks, loading)
    if loading:
        return EngineHealth(ready, progress, loading)
    return EngineHealth(ready, f"ready; {remarks}" if remarks else "ready")
