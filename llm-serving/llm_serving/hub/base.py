"""What is asked of a hub, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class Listing:
    """What a hub has of one revision of a model.

    Attributes:
        name: owner/name.
        revision: Branch, tag or commit that was asked for.
        commit: Which one it is; equal to `revision` where the hub does not tell.
        folder: Where the files of exactly this revision are put, by their names.
        sizes: File name -> bytes.
        website: The model's page.
    """

    name: str
    revision: str
    commit: str
    folder: Path
    sizes: Mapping[str, int]
    website: str


class Hub(Protocol):
    """A hub of models; every method may raise ModelError, whose text says what to do."""

    title: ClassVar[str]

    def snapshot(self, name: str, revision: str) -> Path | None:
        """The folder of a revision in the local cache, perhaps of a part of it; asks no network."""
        ...

    def listing(self, name: str, revision: str) -> Listing:
        """Asks what there is."""
        ...

    def fetch(self, listing: Listing, files: Sequence[str]) -> None:
        """Downloads files into `listing.folder`; what another attempt left is gone on with."""
        ...

    def unfinished_bytes(self, listing: Listing, files: Sequence[str]) -> int:
        """Bytes of these files that an earlier attempt has left on the disk."""
        ...

    def settle(self, listing: Listing) -> None:
        """Everything is there: from now on the revision means this commit without asking."""
        ...
