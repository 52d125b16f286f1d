"""Reload of those configuration keys that need no restart, while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llm_serving.config.reload import Change, check_reload, read_again
from llm_serving.config.schema import ServingConfig
from llm_serving.engine.replicas import Replicas
from llm_serving.errors import ConfigError, RequestError
from llm_serving.log import get_logger
from llm_serving.observability.metrics import Metrics

logger = get_logger(__name__)

TIMEOUT_S: Final = 5.0
"""Maximum seconds to wait for the engines. An engine whose WorkAgent is restarting applies the changes later."""


@dataclass(frozen=True, slots=True)
class ReloadResult:
    changes: list[Change]
    late: list[int]
    """Indices of the replicas that apply the changes after their restart."""


class ConfigReloader:
    """Applies a changed YAML file completely or not at all. Only the event loop may call it."""

    def __init__(self, config: ServingConfig, replicas: Replicas, metrics: Metrics) -> None:
        self.followers: list[Callable[[ServingConfig], None]] = []
        """Functions that get each new configuration. They must not raise errors."""
        self._started = self._running = config
        self._replicas = replicas
        self._metrics = metrics
        self._lock = asyncio.Lock()

    async def reload(self) -> ReloadResult:
        """Read the YAML file again and apply its changes. Each engine applies them between two steps.

        Raise RequestError, and change nothing, if the file is invalid or changes a key that needs a restart.
        """
        async with self._lock:
            try:
                read = await asyncio.to_thread(read_again, self._running)
                changes = check_reload(self._started, self._running, read)
            except ConfigError as error:
                self._metrics.reloaded("refused")
                logger.error("reload failed: %s", error)
                raise RequestError("configuration", f"cannot be applied: {error}") from None
            if not changes:
                self._metrics.reloaded("unchanged")
                logger.info("reload: no key of the YAML has changed")
                return ReloadResult([], [])
            self._running = read
            for follow in self.followers:
                follow(read)
            logger.info("reload applied: %s", "; ".join(map(str, changes)))
            self._metrics.reloaded("applied")
            replies = {index: asyncio.wrap_future(reply) for index, reply in self._replicas.reload(read).items()}
            if replies:
                await asyncio.wait(replies.values(), timeout=TIMEOUT_S)
            return ReloadResult(changes, [index for index, reply in replies.items() if not reply.done()])
