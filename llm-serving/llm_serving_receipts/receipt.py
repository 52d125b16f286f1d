"""The receipt of a response, and its JSON form with checksums that locate an alteration.

Checksums detect accidents and careless edits. If a receipt was altered and sealed again, only computing its response
again detects that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.sampling_params import DEFAULTS, RULES, BeamSearchParams, SamplingParams
from llm_serving.errors import LLMServingError, ReceiptError

VERSION: Final = 3
READABLE_VERSIONS: Final = (1, 2, VERSION)
"""Versions that can be read. Version 1 also listed configuration keys that cannot affect a response. Versions 1 and 2
have no adapter.
"""
MAX_TOKENS: Final = 2**18
"""Maximum number of tokens of a receipt: prompt and generated tokens together."""
CHECKS: Final = "checks"
HASH: Final = "hash"
CHECK_DIGITS: Final = 16
MAX_BYTES: Final = 2**26
_LISTS: Final = ("prompts", "prompt_logprobs", "choices")
"""Fields whose items have their own checksums."""
_encode: Final = msgspec.json.Encoder(order="sorted").encode


class ReceiptChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    text: str
    """SHA-256 of the generated text in UTF-8, before reasoning and tool calls are split from it."""
    logprobs: str | None
    """SHA-256 over the returned log-probabilities, see `digest`; None: the client requested none."""


class ReceiptAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    """Name under which the adapter was loaded."""
    files: str
    """SHA-256 over the adapter's two files, see `llm_serving.formats.peft.fingerprint`."""


class Receipt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything that determines the bytes of a response, and the response as token ids.

    The client, its priority, the time and `cache_salt` are not recorded, because none of them affects a response.
    """

    version: int
    id: str
    created: int
    """Time of the request in seconds since 1970-01-01 UTC."""
    model: str
    """Name under which the model was served."""
    server: str
    """Version of the server."""
    weights: str
    """SHA-256 over config.json and the weight files, see `llm_serving.executor.model_files`."""
    tokenizer: str
    """SHA-256 over the tokenizer's files."""
    adapter: ReceiptAdapter | None = None
    """The adapter that answered; None: the base model answered."""
    computed_by: ComputeFingerprint
    configuration: dict[str, str | int | bool | None]
    """"section.key" -> value, for every key that can affect a response, see `llm_serving.config.output_settings`."""
    max_model_len: int
    """Maximum number of tokens of a sequence for which the model was loaded. Some models derive positions from it."""
    end_token_ids: list[int]
    n: int
    best_of: int
    beam_search: BeamSearchParams | None
    sampling: SamplingParams
    """Parameters of the first choice as they were applied, with the defaults of model and server, and the seed that was
    drawn. In JSON the seed is a string, because numbers in many JSON libraries are too small for it.
    """
    prompts: list[list[int]]
    prompt_logprobs: list[str | None]
    """For each prompt, SHA-256 over the log-probabilities of its tokens; None: the client requested none."""
    choices: list[ReceiptChoice]
    """`n` choices for each prompt, in the order of the prompts."""


@dataclass(frozen=True)
class OpenedReceipt:
    """A receipt that was read from JSON."""

    receipt: Receipt
    altered: tuple[str, ...]
    """Fields whose checksum is wrong. It contains `hash` if only the hash over everything is wrong."""
    texts: Mapping[int, str] = field(default_factory=dict)
    """Index of a choice -> its text in the response that contained the receipt."""


def seal(receipt: Receipt) -> bytes:
    """Encode a receipt as JSON with its checksums and its hash."""
    content = _normalize(msgspec.to_builtins(receipt))
    content["sampling"]["seed"] = str(receipt.sampling.seed)
    content[CHECKS] = checks_of(content)
    content[HASH] = hash_of(content)
    return msgspec.json.encode(content)


def open_receipt(content: Any) -> OpenedReceipt:
    """Read a receipt from decoded JSON.

    Raises:
        ReceiptError: It is not a receipt, or has an unknown version. The message names the missing, wrong or unknown
            field.
    """
    if not isinstance(content, dict):
        raise ReceiptError("must be a JSON object")
    content = _normalize(content)
    given_hash, checks = content.pop(HASH, None), content.get(CHECKS)
    if not isinstance(given_hash, str) or not isinstance(checks, dict):
        raise ReceiptError(f"`{CHECKS}` and `{HASH}` must be present")
    computed_hash = hash_of(content)
    del content[CHECKS]
    if content.get("version") not in READABLE_VERSIONS:
        raise ReceiptError(
            f"`version` must be from {READABLE_VERSIONS[0]} to {VERSION}. Given: {content.get('version')!r:.60}"
        )
    altered = _altered(content, checks) or (() if given_hash == computed_hash else (HASH,))
    try:
        return OpenedReceipt(_read(content), altered)
    except (msgspec.ValidationError, LLMServingError) as error:
        named = f"; what does not fit its hash: {_listed(altered)}" if altered else ""
        raise ReceiptError(f"{error}{named}") from None


def hash_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a normalized receipt without its hash. The JSON that is hashed has sorted names and no
    spaces.
    """
    return hashlib.sha256(_encode(content)).hexdigest()


def checks_of(content: dict[str, Any]) -> dict[str, str]:
    """Return the checksums of a normalized receipt: path of each field -> first digits of the SHA-256 of the field's
    JSON.
    """
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
        # A parameter that the receipt lacks is newer than the receipt, so the request had its default.
        sampling = {**DEFAULTS, **sampling} | {"seed": _seed(sampling.get("seed"))}
    receipt = msgspec.convert(content | {"sampling": sampling}, Receipt)
    if not 1 <= receipt.n <= receipt.best_of:
        raise ReceiptError("`n` must be from 1 to `best_of`")
    if len(receipt.choices) != receipt.n * len(receipt.prompts) or not receipt.choices:
        raise ReceiptError("`choices` must have `n` items for each of `prompts`, and at least one item")
    if len(receipt.prompt_logprobs) != len(receipt.prompts):
        raise ReceiptError("`prompt_logprobs` must have one item for each of `prompts`")
    return receipt


def _seed(value: Any) -> int:
    if not isinstance(value, str) or not (value.isascii() and value.isdigit() and len(value) <= 20):
        raise ReceiptError("`sampling.seed` must be a text of digits")
    return int(value)


def _normalize(value: Any) -> Any:
    """Convert whole numbers to integers, because a JSON library with only one kind of number returns 1.0 for 1."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {name: _normalize(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [each if type(each) is int else _normalize(each) for each in value]
    return value


def _listed(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
