"""`llm-serving run-batch`: answer one file of requests without a server. An interrupted run continues."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from llm_serving.cli.arguments import EXIT_FAILED, add_config_arguments, load_servable, say
from llm_serving.config.schema import ServingConfig
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ConfigError, LLMServingError
from llm_serving.hub.base import DownloadProgress
from llm_serving.log import configure_logging
from llm_serving.server.app import build_site, open_batches
from llm_serving.server.batches.runner import Batches, lines_of
from llm_serving.server.batches.schemas import Batch, Line, RequestCounts
from llm_serving.server.batches.store import CHUNK_BYTES, BatchStore, lock_of, new_file, new_id

POLL_EVERY_S: Final = 0.5
NEVER: Final = 2**40
UNFINISHED: Final = ".unfinished"
"""Suffix of the database next to the output file, which holds the progress of a run."""
ERRORS: Final = ".errors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="IN", help="file of requests: JSON lines with custom_id, method, url and body"
    )
    parser.add_argument(
        "target", type=Path, metavar="OUT", help="file for the answers, in order; failed lines go to OUT.errors"
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.source.is_file():
        raise ConfigError(f"{arguments.source}: no such file")
    config = load_servable(arguments)
    configure_logging(config.serving.log_level, "master")
    counts = run_batch(config, arguments.source, arguments.target)
    say(f"{arguments.target}: {counts.completed} of {counts.total} lines answered, {counts.failed} refused or failed")
    return EXIT_FAILED if counts.failed else 0


def run_batch(config: ServingConfig, source: Path, target: Path) -> RequestCounts:
    """Answer a file of requests, or continue an interrupted run. Raise LLMServingError if that fails."""
    from llm_serving.executor.cluster.placement import open_placement
    from llm_serving.master import build

    if config.models:
        raise ConfigError(
            "run-batch serves one model: `models` must not be given. For several models, send batches to a server"
        )
    with DownloadProgress(unit="line") as bar:

        def show(counts: RequestCounts) -> None:
            bar.total = counts.total or None
            bar.update(counts.completed + counts.failed - bar.n)

        with open_placement(config) as placement:
            return asyncio.run(run_file(build(config, placement), source, target, show))


async def run_file(
    engine: AsyncEngine, source: Path, target: Path, on_progress: Callable[[RequestCounts], None]
) -> RequestCounts:
    """Answer a file of requests with an engine that has not started. Raise ConfigError if the files cannot be used."""
    unfinished = Path(f"{target}{UNFINISHED}")
    for path in (target, Path(f"{target}{ERRORS}"), unfinished, lock_of(unfinished)):
        if path.exists() and path.samefile(source):
            files = f"OUT, OUT{ERRORS}, OUT{UNFINISHED} and its .lock file"
            raise ConfigError(f"{files} must be files other than IN. Give another OUT. Given: {path}")
    batches = open_batches(engine, build_site(engine).internal, unfinished)
    assert batches is not None
    engine.start()
    try:
        await batches.start()
        counts = await answer_file(batches, source, target, on_progress, lambda: engine.failure)
    finally:
        await batches.stop()
        await engine.stop()
    unfinished.unlink()
    lock_of(unfinished).unlink()
    return counts


async def answer_file(
    batches: Batches,
    source: Path,
    target: Path,
    on_progress: Callable[[RequestCounts], None],
    failure: Callable[[], LLMServingError | None],
) -> RequestCounts:
    """Answer the lines of `source`, or continue an interrupted run. Write answers to `target` and failed lines to
    `TARGET.errors`, in the order of the lines. `batches` must use the database `TARGET.unfinished`. Raise ConfigError
    if the input is invalid or has changed since the interrupted run. Raise the error that `failure()`, polled during
    the run, returns.
    """
    digest = await asyncio.to_thread(_digest, source)
    batch = next(iter(await batches.stored(BatchStore.batches, None, 1, None)), None)
    if batch is None:
        batch = await _start_file_run(batches, source, digest)
    elif (batch.metadata or {}).get("sha256") != digest:
        raise ConfigError(f"{target}{UNFINISHED} has the answers to a different input; delete it to start again")
    while not (batch := await batches.stored(BatchStore.batch, batch.id, None)).has_ended:
        on_progress(batch.request_counts)
        if (error := failure() or batches.trouble) is not None:
            raise error
        await asyncio.wait([batches.task(batch.id)], timeout=POLL_EVERY_S)
    on_progress(batch.request_counts)
    if batch.errors is not None:
        await batches.stored(BatchStore.delete_batch, batch.id)  # so that a corrected input can be run
        first = batch.errors.data[0]
        raise ConfigError(f"{source}:{first.line or 1}: {first.message}; {len(batch.errors.data)} errors in all")
    for file_id, path in ((batch.output_file_id, target), (batch.error_file_id, Path(f"{target}{ERRORS}"))):
        await batches.stored(_write, file_id, path)
    return batch.request_counts


async def _start_file_run(batches: Batches, source: Path, digest: str) -> Batch:
    # Delete the files of runs that ended before their batch was created, or whose input was invalid.
    for each in await batches.stored(BatchStore.files, None, None, 100, None):
        await batches.stored(BatchStore.delete_file, each.id)
    now = batches.now()
    about = new_file(new_id("file"), source.name, "batch", now)
    about.expires_at = NEVER
    await batches.stored(BatchStore.add_file, about, "", _pieces(source), now)
    batch = Batch(
        id=new_id("batch"),
        endpoint=_first_url(source),
        input_file_id=about.id,
        created_at=int(now),
        expires_at=NEVER,
        metadata={"sha256": digest},
    )
    await batches.create(batch, "")
    return batch


def _write(store: BatchStore, file_id: str | None, path: Path) -> None:
    if file_id is None:
        path.unlink(missing_ok=True)
        return
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            for piece in store.chunks(file_id):
                file.write(piece)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}; the answers so far are kept") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


def _first_url(path: Path) -> str:
    try:
        return next((msgspec.json.decode(text, type=Line).url for _, text in lines_of(_pieces(path))), "")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
