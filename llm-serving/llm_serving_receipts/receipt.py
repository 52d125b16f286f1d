"""The receipt of a response, the hashes of its texts, and its JSON form with checksums that locate an alteration.

Checksums detect accidents and careless edits. If a receipt was altered and sealed again, only computing its response
again detects that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from struct import pack
from typing import Any, Final

import msgspec
import numpy as np
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import DEFAULTS, RULES, BeamSearchParams, SamplingParams
from llm_serving.errors import LLMServingError, ReceiptError


class ResponseDigest:
    """Accumulates the outputs of a request. The order of choices and the size of outputs do not affect the result.

    Log-probabilities are hashed as little-endian bytes. For each generated token: id (int32), log-probability
    (float32), number of top tokens (int32), their ids (int32) and log-probabilities (float32). For a prompt: SHA-256 of
    five hashes over its tokens except the first: ids (int32), log-probabilities (float32), ranks (int32), and ids
    (int32) and log-probabilities (float32) of the top tokens.
    """

    def __init__(self, sampling: SamplingParams, n: int, num_prompts: int) -> None:
        self._n = n
        self._with_logprobs = sampling.logprobs is not None
        self._num_prompt_logprobs = sampling.prompt_logprobs
        self._choices = [_ChoiceDigest() for _ in range(n * num_prompts)]
        self._prompts: list[_PromptDigest | None] = [None] * num_prompts

    def add(self, index: int, output: RequestOutput) -> None:
        """Add an output of a choice. `index`: index of the prompt times n, plus index of the choice."""
        self._choices[index].add(output)
        if output.prompt_logprobs is not None and self._num_prompt_logprobs is not None:
            prompt = self._prompts[index // self._n] = self._prompts[index // self._n] or _PromptDigest()
            prompt.add(output.prompt_logprobs, self._num_prompt_logprobs)

    def choices(self) -> list[ReceiptChoice]:
        """Return the choices, all of which must have finished."""
        return [choice.finish(with_logprobs=self._with_logprobs) for choice in self._choices]

    def prompt_logprobs(self) -> list[str | None]:
        return [None if prompt is None else prompt.hash() for prompt in self._prompts]


class _ChoiceDigest:
    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._text, self._logprobs = hashlib.sha256(), hashlib.sha256()
        self._last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self._token_ids += output.token_ids
        self._text.update(output.text.encode())
        for token in output.logprobs:
            self._logprobs.update(_logprob_bytes(token))
        self._last = output

    def finish(self, *, with_logprobs: bool) -> ReceiptChoice:
        assert self._last is not None
        assert self._last.finish_reason is not None
        return ReceiptChoice(
            token_ids=self._token_ids,
            finish_reason=self._last.finish_reason.value,
            stop_reason=self._last.stop_reason,
            text=self._text.hexdigest(),
            logprobs=self._logprobs.hexdigest() if with_logprobs else None,
        )


def _logprob_bytes(token: TokenLogprobs) -> bytes:
    k = len(token.top_token_ids)
    return pack(f"<ifi{k}i{k}f", token.token_id, token.logprob, k, *token.top_token_ids, *token.top_logprobs)


class _PromptDigest:
    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(5)]

    def add(self, logprobs: PromptLogprobs, num_top_tokens: int) -> None:
        top = logprobs.top_token_ids[:, :num_top_tokens], logprobs.top_logprobs[:, :num_top_tokens]
        arrays = [logprobs.token_ids, logprobs.logprobs, logprobs.ranks, *top]
        for part, array in zip(self._parts, arrays, strict=True):
            kind = "<f4" if array.dtype.kind == "f" else "<i4"
            part.update(np.ascontiguousarray(array).astype(kind, copy=False).tobytes())

    def hash(self) -> str:
        return hashlib.sha256(b"".join(part.digest() for part in self._parts)).hexdigest()


def response_texts(response: Mapping[str, Any]) -> dict[int, str]:
    """Return index -> text for the choices of a decoded response, except choices with reasoning or tool calls."""
    choices = response.get("choices")
    return dict(_texts(choices)) if isinstance(choices, list) else {}


def _texts(choices: list[Any]) -> Iterator[tuple[int, str]]:
    for position, choice in enumerate(choices):
        if not isinstance(choice, dict):
            continue
        index, text, message = choice.get("index", position), choice.get("text"), choice.get("message")
        if isinstance(message, dict) and not message.get("tool_calls") and not message.get("reasoning_content"):
            text = message.get("content")
        if isinstance(text, str) and isinstance(index, int):
            yield index, text


def has_hash(text: str, prompt: str, text_hash: str) -> bool:
    """Return whether `text`, perhaps after the end of the prompt (`echo`), has this SHA-256."""
    return any(
        prompt.endswith(text[:k]) and hashlib.sha256(text[k:].encode()).hexdigest() == text_hash
        for k in range(min(len(text), len(prompt)) + 1)
    )


VERSION: Final = 3
READABLE_VERSIONS: Final = (1, 2, VERSION)
"""Version 1 also listed configuration keys that cannot affect a response. Versions 1 and 2 have no adapter."""
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
    """SHA-256 over the returned log-probabilities, see `ResponseDigest`; None: the client requested none."""


class ReceiptAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    """Name under which the adapter was loaded."""
    files: str
    """SHA-256 over the adapter's two files, see `llm_serving.formats.peft.fingerprint`."""


class Receipt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything that determines the bytes of a response, and the response as token ids. The client, its priority, the
    time and `cache_salt` affect no response.
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
    """Parameters of the first choice as they were applied, with defaults, and the seed that was drawn. In JSON the seed
    is a string, because numbers in many JSON libraries are too small for it."""
    prompts: list[list[int]]
    prompt_logprobs: list[str | None]
    """For each prompt, SHA-256 over the log-probabilities of its tokens; None: the client requested none."""
    choices: list[ReceiptChoice]
    """`n` choices for each prompt, in the order of the prompts."""


@dataclass(frozen=True)
class OpenedReceipt:
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
    """Read a receipt from decoded JSON. Raise ReceiptError, which names the missing, wrong or unknown field, if it is
    none.
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
    """Return the SHA-256 of the JSON of a normalized receipt without its hash, with sorted names and no spaces."""
    return hashlib.sha256(_encode(content)).hexdigest()


def checks_of(content: dict[str, Any]) -> dict[str, str]:
    """Return the checksums of a normalized receipt: path of a field -> first digits of the SHA-256 of its JSON."""
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
