"""The Hugging Face hub and its mirrors, with the cache that other programs share.

The package `huggingface_hub` downloads interrupted files again from the start. So this module resumes downloads itself:
partial files stay in the cache until they are complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import Any, ClassVar, Final

from llm_serving.errors import ModelError, shorten
from llm_serving.hub.base import DownloadProgress, HubModel, expanded

INSTALL: Final = "pip install huggingface_hub, or the extra `hub` of this package"
_TOKEN: Final = "HF_TOKEN"  # noqa: S105  the name of a variable
_PARTIAL: Final = ".llm-serving.incomplete"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def huggingface_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return expanded(cache, "HF_HUB_CACHE")
    if home := os.environ.get("HF_HOME"):
        return expanded(home, "HF_HOME") / "hub"
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "HF_HUB_CACHE") / "huggingface" / "hub"


def _model_folder(name: str) -> Path:
    return huggingface_cache() / f"models--{name.replace('/', '--')}"


class HuggingFace:
    """The hub at HF_ENDPOINT, or huggingface.co."""

    main_branch: ClassVar[str] = "main"

    def __init__(self) -> None:
        self.endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")

    def cached(self, name: str, revision: str) -> HubModel | None:
        folder, commit = _model_folder(name), revision
        if not _COMMIT.fullmatch(revision):
            try:
                commit = (folder / "refs" / revision).read_text(encoding="ascii").strip()
            except (OSError, ValueError):
                return None
        snapshot = folder / "snapshots" / commit
        is_cached = _COMMIT.fullmatch(commit) and snapshot.is_dir()
        return HubModel(name, "huggingface", revision, commit, snapshot) if is_cached else None

    def all_cached(self) -> Iterator[HubModel]:
        for folder in sorted(huggingface_cache().glob("models--*--*")):
            name = folder.name.removeprefix("models--").replace("--", "/")
            if (model := self.cached(name, self.main_branch)) is not None:
                yield model

    def listed(self, name: str, revision: str) -> HubModel:
        library = _library()
        with self._translated_errors(name, revision):
            found = library.HfApi(endpoint=self.endpoint).model_info(name, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in found.siblings}
        folder = _model_folder(name) / "snapshots" / found.sha
        return HubModel(name, "huggingface", revision, found.sha, folder, sizes, f"{self.endpoint}/{name}")

    def fetch(self, model: HubModel, files: Sequence[str]) -> None:
        blobs = _model_folder(model.name) / "blobs"
        try:
            blobs.mkdir(parents=True, exist_ok=True)
            model.folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                if not (model.folder / file).exists():
                    self._fetch_one(model, file, blobs)
        except PermissionError as error:
            rule = "must be writable; HF_HUB_CACHE names another folder"
            raise ModelError(f"{error.filename or blobs}: {rule}: {error.strerror}") from None

    def unfinished_bytes(self, model: HubModel, sizes: Mapping[str, int]) -> int:
        # Partial files are found by content, so a file that another revision shares is resumed too.
        total = 0
        for path in (_model_folder(model.name) / "blobs").glob(f"*{_PARTIAL}"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return min(total, sum(sizes.values()))

    def settle(self, model: HubModel) -> None:
        if model.revision != model.commit:
            reference = _model_folder(model.name) / "refs" / model.revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            written = reference.with_name(f"{reference.name}.{os.getpid()}")
            written.write_text(model.commit, encoding="ascii")
            written.replace(reference)

    def _fetch_one(self, model: HubModel, file: str, blobs: Path) -> None:
        library = _library()
        url = library.hf_hub_url(model.name, file, revision=model.commit, endpoint=self.endpoint)
        with self._translated_errors(model.name, model.revision):
            head = library.get_hf_file_metadata(url, endpoint=self.endpoint)
        if not head.etag or "/" in head.etag or head.etag.startswith("."):
            raise ModelError(
                f"{url}: {self.endpoint} must answer with the hash of the file as ETag, as Hugging Face does"
            )
        blob = blobs / head.etag
        if not blob.exists():
            with _partial_file(blobs / f"{head.etag}{_PARTIAL}", blob) as part:
                if part is not None:
                    self._fill(part, blob, url, file, head.size, model)
        pointer = model.folder / file
        pointer.parent.mkdir(parents=True, exist_ok=True)
        _link(pointer, blob)

    def _fill(self, part: BufferedRandom, blob: Path, url: str, file: str, size: int | None, model: HubModel) -> None:
        from huggingface_hub.file_download import http_get

        library = _library()
        num_bytes = part.seek(0, os.SEEK_END)
        if size is not None and num_bytes > size:
            num_bytes = part.truncate(part.seek(0))
        try:
            with self._translated_errors(model.name, model.revision):
                headers = library.utils.build_hf_headers()
                http_get(
                    url,
                    part,
                    resume_size=num_bytes,
                    headers=headers,
                    expected_size=size,
                    displayed_filename=file,
                    tqdm_class=DownloadProgress,
                )
        finally:
            part.flush()
        if not _has_hash(part, blob.name):
            part.truncate(0)
            raise ModelError(
                f"{url}: the downloaded file does not have the hash that {self.endpoint} announced; download it again"
            )
        Path(part.name).replace(blob)

    @contextmanager
    def _translated_errors(self, name: str, revision: str) -> Iterator[None]:
        import httpx2
        from huggingface_hub import errors

        where = f"{name} at {self.endpoint}"
        try:
            yield
        except errors.GatedRepoError:
            raise self._gated(name) from None
        except errors.RepositoryNotFoundError:
            raise ModelError(
                f"{where}: there is no such model, or it is private. Look the name up at {self.endpoint}/models; for a "
                f"private one set {_TOKEN} to a token that may read it"
            ) from None
        except errors.RevisionNotFoundError:
            raise ModelError(
                f"{where} has no revision {revision}: model_config.model_revision must be a branch, a tag or a commit"
            ) from None
        except errors.EntryNotFoundError as error:
            raise ModelError(f"{where}: {_first_line(error)}") from None
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            hint = f"; {_TOKEN} must be a token that may read the model" if status in (401, 403) else ""
            raise ModelError(f"{where} answered {status}: {_first_line(error)}{hint}") from None
        except (httpx2.HTTPError, OSError, ValueError) as error:
            if isinstance(error, PermissionError):
                raise
            raise ModelError(
                f"{where} cannot be read: {_first_line(error)}. Partial downloads are kept: start again to resume "
                f"them; set HF_ENDPOINT to a mirror, or give --model a folder that was downloaded elsewhere"
            ) from None

    def _gated(self, name: str) -> ModelError:
        known = bool(os.environ.get(_TOKEN))
        account = f"the account of {_TOKEN}" if known else "an account"
        then = "" if known else f", then set {_TOKEN} to a token of that account"
        return ModelError(
            f"{name} is gated: accept its conditions with {account} at {self.endpoint}/{name}, wait until access is "
            f"granted{then}, and start again"
        )


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(f"models of the Hugging Face hub need the package huggingface_hub: {INSTALL}") from None
    return huggingface_hub


@contextmanager
def _partial_file(path: Path, blob: Path) -> Iterator[BufferedRandom | None]:
    """Yield the partial file, locked against other processes. Yield None if another process has completed the file."""
    while True:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if blob.exists():
                path.unlink(missing_ok=True)
                yield None
                return
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                    yield file
                    return


def _has_hash(file: BufferedRandom, etag: str) -> bool:
    """Return whether the content matches the ETag: SHA-256 of a large file, the git blob hash of a small one."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if len(etag) == 64:
        return hashlib.file_digest(file, "sha256").hexdigest() == etag
    if len(etag) == 40:
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        while piece := file.read(2**20):
            digest.update(piece)
        return digest.hexdigest() == etag
    return True


def _link(pointer: Path, blob: Path) -> None:
    temporary = pointer.with_name(f".{pointer.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        blob.replace(pointer)
        return
    temporary.replace(pointer)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return shorten(lines[0])[1:-1] if lines else type(error).__name__
