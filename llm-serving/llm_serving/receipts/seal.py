"""Receipts as JSON that tells where it was altered: a checksum for each field and a hash over all of it.

A seal finds accidents and careless hands. Whoever alters a receipt and seals it anew is found by computing it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from llm_serving.core.sampling_params import DEFAULTS, RULES
from llm_serving.errors import LLMServingError, ReceiptError
from llm_serving.receipts.receipt import READABLE, Receipt

CHECKS: Final = "checks"
HASH: Final = "hash"
CHECK_DIGITS: Final = 16
MAX_BYTES: Final = 2**26
_LISTS: Final = ("prompts", "prompt_logprobs", "choices")
"""Fields whose items have checksums of their own."""
_encode: Final = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True)
class Opened:
    """A receipt that was read."""

    receipt: Receipt
    altered: tuple[str, ...]
    """Fields that do not fit the seal; `hash` where nothing but the seal itself does not."""
    texts: Mapping[int, str] = field(default_factory=dict)
    """Of the answer that it came with, by the index of the choice."""


def sealed(receipt: Receipt) -> bytes:
    """A receipt as JSON, with its checksums and its hash."""
    content = _plain(msgspec.to_builtins(receipt))
    content["sampling"]["seed"] = str(receipt.sampling.seed)
    content[CHECKS] = checks_of(content)
    content[HASH] = hash_of(content)
    return msgspec.json.encode(content)


def opened(content: Any) -> Opened:
    """A receipt from the JSON that it was read as.

    Raises:
        ReceiptError: It is none, or none of this version; names what is missing, wrong or unknown.
    """
    if not isinstance(content, dict):
        raise ReceiptError("must be an object of JSON")
    content = _plain(content)
    told, checks = content.pop(HASH, None), content.get(CHECKS)
    if not isinstance(told, str) or not isinstance(checks, dict):
        raise ReceiptError(f"`{CHECKS}` and `{HASH}` must be there")
    found = hash_of(content)
    del content[CHECKS]
    if content.get("version") not in READABLE:
        versions = " or ".join(map(str, READABLE))
        raise ReceiptError(f"`version` must be {versions}. Given: {content.get('version')!r:.60}")
    altered = _altered(content, checks) or (() if told == found else (HASH,))
    try:
        return Opened(_read(content), altered)
    except (msgspec.ValidationError, LLMServingError) as error:
        named = f"; what does not fit its hash: {_listed(altered)}" if altered else ""
        raise ReceiptError(f"{error}{named}") from None


def hash_of(content: dict[str, Any]) -> str:
    """SHA-256 of a plain receipt without its hash: its JSON with sorted names and without spaces."""
    return hashlib.sha256(_encode(content)).hexdigest()


def checks_of(content: dict[str, Any]) -> dict[str, str]:
    """Path of a field -> the first digits of the SHA-256 of its JSON, for all of a plain receipt."""
    return {path: hashlib.sha256(_encode(value)).hexdigest()[:CHECK_DIGITS] for path, value in _leaves(content)}


def _altered(content: dict[str, Any], checks: dict[str, Any]) -> tuple[str, ...]:
    found = checks_of(content)
    return tuple(path for path in dict.fromkeys([*found, *checks]) if found.get(path) != checks.get(path))


def _leaves(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
        elif path in _LISTS and isinstance(value, list):
            yield from _leaves({f"{path}[{i}]": item for i, item in enumerate(value)})
        else:
            yield path, value


def _read(content: dict[str, Any]) -> Receipt:
    sampling = content.get("sampling")
    if isinstance(sampling, dict):
        if unknown := sorted(set(sampling) - set(RULES)):
            raise ReceiptError(f"`sampling` has parameters that this version does not know: {_listed(unknown)}")
        sampling = {**DEFAULTS, **sampling} | {"seed": _seed(sampling.get("seed"))}  # newer ones: nobody asked for them
    receipt = msgspec.convert(content | {"sampling": sampling}, Receipt)
    if not 1 <= receipt.n <= receipt.best_of:
        raise ReceiptError("`n` must be from 1 to `best_of`")
    if len(receipt.choices) != receipt.n * len(receipt.prompts) or not receipt.choices:
        raise ReceiptError("`choices` must hold `n` for each of `prompts`, and at least one")
    if len(receipt.prompt_logprobs) != len(receipt.prompts):
        raise ReceiptError("`prompt_logprobs` must hold one for each of `prompts`")
    return receipt


def _seed(value: Any) -> int:
    if not isinstance(value, str) or not (value.isascii() and value.isdigit() and len(value) <= 20):
        raise ReceiptError("`sampling.seed` must be a text of digits")
    return int(value)


def _plain(value: Any) -> Any:
    """Numbers in one form, whoever wrote them last: where JSON knows one kind, 1.0 comes back as 1."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [each if type(each) is int else _plain(each) for each in value]
    return value


def _listed(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
