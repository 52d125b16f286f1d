"""`llm-serving verify`: receipts of a file, one or many, computed again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from llm_serving.config.schema import ServingConfig
from llm_serving.errors import ConfigError, ReceiptError
from llm_serving.hub.base import Progress
from llm_serving.receipts.contents import ModelFiles, content_hashes
from llm_serving.receipts.seal import MAX_BYTES, Opened, opened
from llm_serving.receipts.told_texts import told_texts

EQUAL: Final = 0
DIFFERENT: Final = 1
UNREADABLE: Final = 2
STANDARD_INPUT: Final = Path("-")


class Item(NamedTuple):
    """What stands in one place of a file."""

    place: str
    found: Opened | ReceiptError


def verify_file(
    path: Path, load: Callable[[Sequence[str]], ServingConfig], say: Callable[[str], None], tell: Callable[[str], None]
) -> int:
    """Verifies the receipts of a file: JSON, or a JSON a line; each a receipt, or an answer that has one.

    Args:
        path: The file; `-` is standard input.
        load: The configuration with further overrides.
        say: Told what goes on.
        tell: Told the results.

    Returns:
        `EQUAL`, `DIFFERENT` if any receipt differs, `UNREADABLE` if one cannot be read.

    Raises:
        ConfigError: The file or the model cannot be read.
    """
    items = list(read_items(path))
    unreadable = [item for item in items if isinstance(item.found, ReceiptError)]
    readable = [(item.place, item.found) for item in items if isinstance(item.found, Opened)]
    for item in unreadable:
        tell(f"{item.place}: unreadable: {item.found}")
    num_equal = _verify(readable, load, say, tell) if readable else 0
    if len(items) > 1:
        different = len(readable) - num_equal
        tell(f"{len(items)} receipts: {num_equal} equal, {different} different, {len(unreadable)} unreadable")
    if unreadable:
        return UNREADABLE
    return EQUAL if num_equal == len(readable) else DIFFERENT


def _verify(
    receipts: list[tuple[str, Opened]],
    load: Callable[[Sequence[str]], ServingConfig],
    say: Callable[[str], None],
    tell: Callable[[str], None],
) -> int:
    """Tells of each; returns how many are equal."""
    from llm_serving.cli.verifier import Verifier  # MindSpore takes seconds: not for what cannot be read

    model = load(()).model
    assert model.model_path is not None
    files = ModelFiles.served(model)
    say(f"hashing {files.num_bytes / 2**20:,.0f} MiB of {model.model_path.name}")
    with Progress(total=files.num_bytes, unit="B", unit_scale=True) as bar:
        hashes = content_hashes(files, bar.update)
    verifier, num_equal = Verifier(load, hashes, say, [each.receipt for _, each in receipts]), 0
    try:
        with Progress(total=len(receipts), unit="receipt") as bar:
            for place, each in receipts:
                verdict = verifier.verify(each)
                num_equal += verdict.equal
                result = "equal" if verdict.equal else "different"
                tell(f"{place}: {result}: {each.receipt.id}, {verdict.num_tokens} tokens computed again")
                for line in verdict.differences:
                    tell(f"    {line}")
                for line in verdict.notes:
                    tell(f"    note: {line}")
                bar.update()
    finally:
        verifier.close()
    return num_equal


def read_items(path: Path) -> Iterator[Item]:
    """Every receipt of a file, or why it is none.

    Raises:
        ConfigError: The file cannot be read.
    """
    name = "standard input" if path == STANDARD_INPUT else str(path)
    try:
        data = sys.stdin.buffer.read() if path == STANDARD_INPUT else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from None
    lines = [(number, line) for number, line in enumerate(data.splitlines(), start=1) if line.strip()]
    if not lines:
        yield Item(name, ReceiptError("there is no receipt in it"))
    elif len(lines) == 1 or not any(_is_object(line) for _, line in lines):  # one that is written over several lines
        yield Item(name, _item(data))
    else:
        for number, line in lines:
            yield Item(f"{name}:{number}", _item(line))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False


def _item(data: bytes) -> Opened | ReceiptError:
    if len(data) > MAX_BYTES:
        return ReceiptError(f"must be at most {MAX_BYTES} bytes")
    try:
        content: Any = msgspec.json.decode(data)
        if isinstance(content, dict) and "receipt" in content:
            return replace(opened(content["receipt"]), texts=told_texts(content))
        return opened(content)
    except ReceiptError as error:
        return error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return ReceiptError(f"is no JSON: {error}")
