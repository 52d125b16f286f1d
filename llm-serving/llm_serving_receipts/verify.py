"""`llm-serving verify`: compute the responses of receipts again and compare."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from llm_serving.cli.arguments import add_config_arguments, load_servable, say
from llm_serving.config import load_config
from llm_serving.config.schema import ServingConfig
from llm_serving.errors import ConfigError, ReceiptError
from llm_serving.executor.model_files import ModelFiles, content_hashes
from llm_serving.hub.base import DownloadProgress
from llm_serving.log import configure_logging

from llm_serving_receipts.receipt import MAX_BYTES, OpenedReceipt, open_receipt, response_texts

EQUAL: Final = 0
DIFFERENT: Final = 1
UNREADABLE: Final = 2
STANDARD_INPUT: Final = Path("-")


class Item(NamedTuple):
    """A receipt in a file, or the error for which it cannot be read."""

    source: str
    """File name, and the line number if the file has several receipts."""
    content: OpenedReceipt | ReceiptError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=Path,
        metavar="RECEIPT",
        help="JSON or JSON lines: receipts, or responses with a receipt; - is stdin",
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config, overrides = load_servable(arguments), list(arguments.overrides)
    configure_logging("WARNING", "verify")

    def load(more: Sequence[str]) -> ServingConfig:
        return load_config(arguments.config, [*overrides, *more], arguments.model) if more else config

    return verify_file(arguments.file, load, say, print)


def verify_file(
    path: Path,
    load: Callable[[Sequence[str]], ServingConfig],
    on_progress: Callable[[str], None],
    on_result: Callable[[str], None],
) -> int:
    """Verify the receipts of a file in JSON or JSON lines (`-`: standard input); each value is a receipt, or a response
    with one.

    Return `EQUAL`, `DIFFERENT` if any receipt differs, or `UNREADABLE` if one cannot be read. Raise ConfigError if the
    file or the model cannot be read. `load`: returns the configuration with additional overrides.
    """
    items = list(read_items(path))
    unreadable = [item for item in items if isinstance(item.content, ReceiptError)]
    readable = [(item.source, item.content) for item in items if isinstance(item.content, OpenedReceipt)]
    for item in unreadable:
        on_result(f"{item.source}: unreadable: {item.content}")
    num_equal = _verify(readable, load, on_progress, on_result) if readable else 0
    if len(items) > 1:
        different = len(readable) - num_equal
        on_result(f"{len(items)} receipts: {num_equal} equal, {different} different, {len(unreadable)} unreadable")
    if unreadable:
        return UNREADABLE
    return EQUAL if num_equal == len(readable) else DIFFERENT


def _verify(
    receipts: list[tuple[str, OpenedReceipt]],
    load: Callable[[Sequence[str]], ServingConfig],
    on_progress: Callable[[str], None],
    on_result: Callable[[str], None],
) -> int:
    """Verify these receipts, and return how many of the responses are equal."""
    from llm_serving_receipts.verifier import Verifier  # imports MindSpore, which takes seconds

    model = load(()).model
    files = ModelFiles.served(model)
    on_progress(f"hashing {files.num_bytes / 2**20:,.0f} MiB of {model.folder.name}")
    with DownloadProgress(total=files.num_bytes, unit="B", unit_scale=True) as bar:
        hashes = content_hashes(files, bar.update)
    verifier, num_equal = Verifier(load, hashes, on_progress, [each.receipt for _, each in receipts]), 0
    try:
        with DownloadProgress(total=len(receipts), unit="receipt") as bar:
            for source, each in receipts:
                verdict = verifier.verify(each)
                num_equal += verdict.equal
                result = "equal" if verdict.equal else "different"
                on_result(f"{source}: {result}: {each.receipt.id}, {verdict.num_tokens} tokens computed again")
                for line in verdict.differences:
                    on_result(f"    {line}")
                for line in verdict.notes:
                    on_result(f"    note: {line}")
                bar.update()
    finally:
        verifier.close()
    return num_equal


def read_items(path: Path) -> Iterator[Item]:
    """Yield every receipt of a file, or the error for which it cannot be read. Raise ConfigError if the file is
    unreadable.
    """
    name = "standard input" if path == STANDARD_INPUT else str(path)
    try:
        data = sys.stdin.buffer.read() if path == STANDARD_INPUT else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from None
    lines = [(number, line) for number, line in enumerate(data.splitlines(), start=1) if line.strip()]
    if not lines:
        yield Item(name, ReceiptError("contains no receipt"))
    elif len(lines) == 1 or not any(_is_object(line) for _, line in lines):  # one JSON value over several lines
        yield Item(name, _item(data))
    else:
        for number, line in lines:
            yield Item(f"{name}:{number}", _item(line))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False


def _item(data: bytes) -> OpenedReceipt | ReceiptError:
    if len(data) > MAX_BYTES:
        return ReceiptError(f"must be at most {MAX_BYTES} bytes")
    try:
        content: Any = msgspec.json.decode(data)
        if isinstance(content, dict) and "receipt" in content:
            return replace(open_receipt(content["receipt"]), texts=response_texts(content))
        return open_receipt(content)
    except ReceiptError as error:
        return error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return ReceiptError(f"is no JSON: {error}")
