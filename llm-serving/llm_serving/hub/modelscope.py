"""The ModelScope hub with its own cache. The `modelscope_hub` package downloads and resumes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

from llm_serving.errors import ModelError, shorten
from llm_serving.hub.base import Listing, modelscope_cache, modelscope_snapshot

INSTALL: Final = "pip install modelscope-hub, or the extra `modelscope` of this package"


class ModelScope:
    """The hub at MODELSCOPE_ENDPOINT, or www.modelscope.cn."""

    title: ClassVar[str] = "ModelScope"

    def snapshot(self, name: str, revision: str) -> Path | None:
        return modelscope_snapshot(name, revision)

    def listing(self, name: str, revision: str) -> Listing:
        with _translated_errors(name, revision):
            files = _api().list_repo_files(name, "model", revision=revision, recursive=False)
            sizes = {file.path: file.size for file in files if not file.is_dir}
        owner, _, model = name.partition("/")
        folder = modelscope_cache() / "models" / f"{owner}--{model}" / "snapshots" / revision
        return Listing(name, revision, revision, folder, sizes, f"https://www.modelscope.cn/models/{name}")

    def fetch(self, listing: Listing, files: Sequence[str]) -> None:
        missing = [file for file in files if not (listing.folder / file).exists()]
        if not missing:
            return
        with _translated_errors(listing.name, listing.revision):
            # The folder is explicit, because by default the package would use the folder of an older release.
            _api().download_repo(
                listing.name,
                "model",
                revision=listing.revision,
                local_dir=listing.folder,
                allow_patterns=missing,
            )

    def unfinished_bytes(self, listing: Listing, files: Sequence[str]) -> int:
        return 0

    def settle(self, listing: Listing) -> None:
        return


def _api() -> Any:
    try:
        from modelscope_hub import HubApi
    except ImportError:
        raise ModelError(f"models of ModelScope need the package modelscope-hub: {INSTALL}") from None
    # Passed explicitly, because the package reads the environment only once.
    return HubApi(endpoint=os.environ.get("MODELSCOPE_ENDPOINT"), token=os.environ.get("MODELSCOPE_API_TOKEN"))


@contextmanager
def _translated_errors(name: str, revision: str) -> Iterator[None]:
    where = f"{name} at ModelScope"
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001  its errors have no common base class
        kind = type(error).__name__
        text = shorten(str(error))[1:-1]
        status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status_code", None)
        if status == 404 or "NotExist" in kind or "NotFound" in kind:
            raise ModelError(
                f"{where}, revision {revision}: there is no such model or revision, or it is private. Look the name up "
                f"at https://www.modelscope.cn/models; for a private one set MODELSCOPE_API_TOKEN"
            ) from None
        if status in (401, 403):
            raise ModelError(
                f"{where} may not be read: accept the conditions on its page with a ModelScope account, then set "
                f"MODELSCOPE_API_TOKEN to a token of that account"
            ) from None
        raise ModelError(f"{where} cannot be read: {kind}: {text}. Start again to resume the download") from None
