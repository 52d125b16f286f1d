"""A model folder's generation config: default sampling parameters and end-of-sequence ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import read_regular
from llm_serving.core.sampling_params import RULES, Whole
from llm_serving.errors import ModelError, RequestError, shorten

GENERATION_CONFIG: Final = "generation_config.json"
MAX_BYTES: Final = 2**20
MAX_END_IDS: Final = 256
PARAMETERS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key of the file -> sampling parameter. Other keys, such as `do_sample`, have no effect."""

AT_LEAST_ONE: Final = Whole(1)
"""Rule for parameters whose value 0 is valid in a request but would be a mistake as a default."""


def generation_defaults(folder: Path | None) -> dict[str, Any]:
    """Return sampling parameter -> default of a folder with a generation config. Raise ModelError for bad values."""
    if folder is None:
        return {}
    path, content = folder / GENERATION_CONFIG, _read(folder / GENERATION_CONFIG)
    defaults = {}
    for key, name in PARAMETERS.items():
        value = content.get(key)
        if value is not None:
            try:
                rule = AT_LEAST_ONE if key == "max_new_tokens" else RULES[name]
                defaults[name] = rule.checked(key, 0 if key == "top_k" and value == -1 else value)
            except RequestError as error:
                raise ModelError(
                    f"{path}: {error}. Correct the file, or set model_config.generation_config: none"
                ) from None
    return defaults


def generation_end_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids of `eos_token_id` in a folder's generation config. Raise ModelError for invalid values."""
    path = folder / GENERATION_CONFIG
    value = _read(path).get("eos_token_id")
    items = value if isinstance(value, list) else [] if value is None else [value]
    if len(items) > MAX_END_IDS or not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise ModelError(
            f"{path}: `eos_token_id` must be a token id or a list of at most {MAX_END_IDS}. Given: {shorten(value)}"
        )
    return tuple(dict.fromkeys(item for item in items if item >= 0))


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(read_regular(path, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object. Given: {shorten(content)}")
    return content
