"""The console command `llm-serving`: serve, config check, version."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from llm_serving import __version__
from llm_serving.config import ServingConfig, load_config
from llm_serving.config.report import describe
from llm_serving.errors import ConfigError, LLMServingError
from llm_serving.log import configure_logging, get_logger

EXIT_FAILED = 1
EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, 1 when serving failed, 2 when the arguments or the configuration are wrong.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except LLMServingError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llm-serving", description="LLM serving on MindSpore.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start the master, its WorkAgents and the HTTP server")
    _add_config_arguments(serve)
    serve.add_argument("--port", type=int, metavar="N", help="port of the HTTP server (serving_config.server_port)")
    serve.set_defaults(run=_serve)

    config = commands.add_parser("config", help="work with a configuration")
    config_commands = config.add_subparsers(required=True, metavar="COMMAND")
    check = config_commands.add_parser("check", help="print the effective values and where each came from")
    _add_config_arguments(check)
    check.set_defaults(run=_check)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="YAML", help="serving YAML; configs/serving.yaml lists every key"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="folder in Hugging Face form, or `demo`")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides", help="override any key"
    )


def _load(arguments: argparse.Namespace) -> ServingConfig:
    overrides = list(arguments.overrides)
    if getattr(arguments, "port", None) is not None:
        overrides.append(f"serving_config.server_port={arguments.port}")
    return load_config(arguments.config, overrides, arguments.model)


def _serve(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    if config.model.model_path is None:
        raise ConfigError("no model to serve: pass --model FOLDER (or --model demo), or set model_config.model_path")
    configure_logging(config.serving.log_level, "master")
    for notice in config.notices:
        get_logger(__name__).warning(notice)
    # Imported here so that `config check` and `version` answer at once.
    from llm_serving import master

    return int(master.run(config))


def _check(arguments: argparse.Namespace) -> int:
    text = describe(_load(arguments))
    with contextlib.suppress(BrokenPipeError):  # the reader, such as `head`, may leave early
        print(text, flush=True)
    return 0


def _version(arguments: argparse.Namespace) -> int:
    print(f"llm-serving {__version__}")
    return 0
