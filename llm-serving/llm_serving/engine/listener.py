"""What an engine reports to the owner of its replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_serving.kvcache.transfer_pool import TransferBlock

if TYPE_CHECKING:
    from llm_serving.engine.fleet.migration import MigratingRequest


class EngineListener:
    """Base class; each event does nothing. Events come in the engine's thread unless the event says otherwise."""

    def on_started(self, request_ids: list[str]) -> None:
        """A step was submitted that computes these requests for the first time; nothing of it is published yet."""

    def on_restart_attempt(self) -> None:
        """Another attempt to restart the WorkAgent has been made."""

    def on_closing(self) -> None:
        """The engine accepts no further requests: it has ended or is about to. From any thread."""

    def on_woken(self) -> None:
        """Another replica has changed what both share: the engine looks at it before its next step. From any thread."""

    def on_migrating(self, requests: list[MigratingRequest]) -> None:
        """Other replicas must continue these requests; their clients have all output of this engine."""

    def on_blocks_released(self, blocks: list[TransferBlock]) -> None:
        """This engine has read these blocks of other replicas and needs them no more."""
