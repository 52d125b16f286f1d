"""What several subcommands take and read alike."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final, TypeAlias

from llm_serving.commands.flags import API_KEY_VARIABLE, add_flags, overrides_of, overrides_of_environment
from llm_serving.commands.stored_models import check_weights, get_weights
from llm_serving.config import ServingConfig, load_config
from llm_serving.errors import ConfigError

EXIT_FAILED: Final = 1
MAX_SEED: Final = 2**32 - 1
DEFAULT_URL: Final = "http://127.0.0.1:8835"
"""Where a server listens unless told otherwise."""

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def check_out(path: Path, *read: Path) -> None:
    """Raises ConfigError where no file can be written, or one of those that are read would be lost.

    Before what takes long, and not after it.
    """
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"{path}: must be a file in a folder that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: must be a file that may be written")
    if path.exists() and any(each.exists() and path.samefile(each) for each in read):
        raise ConfigError(f"{path}: must be another file than those that are read")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `load` and `load_servable` read."""
    parser.add_argument(
        "--config", type=Path, metavar="YAML", help="serving YAML; `llm-serving config reference` lists every key"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder in Hugging Face form, GGUF file, name of a model at a hub such as Qwen/Qwen3-0.6B, or `demo`",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides", help="override any key"
    )
    add_flags(parser)


def add_server_arguments(parser: argparse.ArgumentParser, whose_key: str = "") -> None:
    """Adds where a running server is, and the key that `api_key_of` reads."""
    parser.add_argument("--url", default=DEFAULT_URL, help="of the server")
    parser.add_argument(
        "--api-key", metavar="KEY", default="", help=f"{whose_key}better in the environment variable {API_KEY_VARIABLE}"
    )


def api_key_of(arguments: argparse.Namespace) -> str:
    """The key to show to a running server; empty: none."""
    return str(arguments.api_key or os.environ.get(API_KEY_VARIABLE, ""))


def load(arguments: argparse.Namespace) -> ServingConfig:
    """The configuration; `arguments.overrides` then has what the flags and the environment add to it.

    Raises:
        ConfigError: Of a flag, a key or the model.
    """
    arguments.overrides += overrides_of(arguments)
    config = load_config(arguments.config, arguments.overrides, arguments.model)
    if added := overrides_of_environment(config):
        arguments.overrides += added
        config = load_config(arguments.config, arguments.overrides, arguments.model)
    return config


def load_servable(arguments: argparse.Namespace) -> ServingConfig:
    """The configuration of a model whose weights are here, downloaded if it was named and is not.

    Raises:
        ConfigError: There is no model, or it cannot be served here.
    """
    config = load(arguments)
    if config.model.model_path is None:
        raise ConfigError("no model to serve: pass --model FOLDER (or --model demo), or set model_config.model_path")
    get_weights(config, say)
    check_weights(config)
    return config


def seed(written: str) -> int:
    """Of draws, for argparse: what every generator takes."""
    if not written.isdecimal() or int(written) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {MAX_SEED}. Given: {written!r}")
    return int(written)


def say(text: str) -> None:
    """Tells a person what goes on; what a program would read goes to standard output."""
    print(text, file=sys.stderr, flush=True)
