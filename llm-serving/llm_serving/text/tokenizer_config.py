"""`tokenizer_config.json` and the files that older folders have beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llm_serving.core.unicode import json_of
from llm_serving.errors import ModelError, shorten
from llm_serving.text.vocabulary import read_limited

CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_FILE: Final = "special_tokens_map.json"
ADDED_FILE: Final = "added_tokens.json"
SPECIAL_NAMES: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MORE_SPECIAL: Final = "additional_special_tokens"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no file.

    Raises:
        ModelError: It cannot be read, or is none.
    """
    if not path.exists():
        return {}
    try:
        content = json_of(read_limited(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object. Given: {shorten(content)}")
    return content


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The config of a folder. One that lists no added tokens has them in `added_tokens.json`, and what the special
    ones are for in `special_tokens_map.json`.

    Raises:
        ModelError: A file cannot be read.
    """
    config = read_json(folder / CONFIG_FILE)
    if _lists_tokens(config):
        return config
    config |= read_json(folder / SPECIAL_FILE)
    special = {*special_texts(config).values(), *more_special_texts(config)}
    added = {
        str(token_id): {"content": text, "special": text in special}
        for text, token_id in read_json(folder / ADDED_FILE).items()
    }
    return config | {"added_tokens_decoder": added} if added else config


def config_files(folder: Path) -> list[Path]:
    """The files that `read_tokenizer_config` reads where they are there.

    Raises:
        ModelError: The first of them cannot be read.
    """
    first = folder / CONFIG_FILE
    return [first] if _lists_tokens(read_json(first)) else [first, folder / SPECIAL_FILE, folder / ADDED_FILE]


def special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by their use, such as `bos_token`."""
    return {name: text for name in SPECIAL_NAMES if (text := _text(config.get(name)))}


def more_special_texts(config: Mapping[str, Any]) -> list[str]:
    """Texts of `additional_special_tokens`."""
    items = config.get(MORE_SPECIAL)
    texts = map(_text, items) if isinstance(items, list) else ()
    return [text for text in texts if text]


def flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    """A value that is true or false; `default` where it is neither."""
    value = config.get(name)
    return value if isinstance(value, bool) else default


def _lists_tokens(config: Mapping[str, Any]) -> bool:
    return "added_tokens_decoder" in config


def _text(value: Any) -> str | None:
    """A token that is written as text, or as an object that holds it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None
