"""What a model folder says of sampling: the defaults of requests that say nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import read_regular
from llm_serving.core.sampling_params import RULES
from llm_serving.errors import ModelError, RequestError, shorten

GENERATION_CONFIG: Final = "generation_config.json"
MAX_BYTES: Final = 2**20
PARAMETERS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key of the file -> parameter. Others, `do_sample` among them, say how another library is called."""


def generation_defaults(folder: Path | None) -> dict[str, Any]:
    """Parameter -> default, of a model folder; empty where it has no file or says nothing.

    Raises:
        ModelError: The file cannot be read, or holds a value that no request may have.
    """
    if folder is None or not (path := folder / GENERATION_CONFIG).exists():
        return {}
    try:
        content = json.loads(read_regular(path, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object. Given: {shorten(content)}")
    defaults = {}
    for key, name in PARAMETERS.items():
        value = content.get(key)
        if value is not None:
            try:
                defaults[name] = RULES[name].checked(key, 0 if key == "top_k" and value == -1 else value)
            except RequestError as error:
                raise ModelError(f"{path}: {error}, or model_config.generation_config: none") from None
    return defaults
