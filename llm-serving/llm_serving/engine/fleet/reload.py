"""A running server takes over what its YAML says now, as far as that needs no restart."""

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
"""Seconds that engines are waited for; one that starts its WorkAgent again takes longer, and follows then."""


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What came of it."""

    changes: list[Change]
    late: list[int]
    """Replicas that follow later."""


class ConfigReloader:
    """Lives on the event loop; all of the new configuration counts there from one moment on, or none of it.

    Each engine follows between two of its steps. What has been let in stays, and goes on by the new rules.
    """

    def __init__(self, config: ServingConfig, replicas: Replicas, metrics: Metrics) -> None:
        self.followers: list[Callable[[ServingConfig], None]] = []
        """Told of the new configuration; they raise nothing."""
        self._started = self._running = config
        self._replicas = replicas
        self._metrics = metrics
        self._lock = asyncio.Lock()

    async def reload(self) -> ReloadResult:
        """Reads the YAML again.

        Raises:
            RequestError: It breaks a rule, or changes what only a restart does. Then nothing is changed.
        """
        async with self._lock:
            try:
                read = await asyncio.to_thread(read_again, self._running)
                changes = check_reload(self._started, self._running, read)
            except ConfigError as error:
                self._metrics.reloaded("refused")
                logger.error("reload: %s", error)
                raise RequestError("configuration", f"cannot be taken over: {error}") from None
            if not changes:
                self._metrics.reloaded("unchanged")
                logger.info("reload: nothing has changed")
                return ReloadResult([], [])
            return await self._follow(read, changes)

    async def _follow(self, read: ServingConfig, changes: list[Change]) -> ReloadResult:
        self._running = read
        for follow in self.followers:
            follow(read)
        logger.info("reload: %s", "; ".join(map(str, changes)))
        self._metrics.reloaded("applied")
        asked = {index: asyncio.wrap_future(answer) for index, answer in self._replicas.reload(read).items()}
        if asked:
            await asyncio.wait(asked.values(), timeout=TIMEOUT_S)
        return ReloadResult(changes, [index for index, answer in asked.items() if not answer.done()])
