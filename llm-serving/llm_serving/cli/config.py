"""Commands about the configuration and the installation: `config`, `hash-key` and `version`."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path

from llm_serving import __version__
from llm_serving.cli.arguments import (
    API_KEY,
    Subcommands,
    add_command,
    add_config_arguments,
    check_weights,
    load,
    stored_size,
)
from llm_serving.config import ServingConfig
from llm_serving.config.report import describe
from llm_serving.core.process import import_optional
from llm_serving.core.sampling_params import GENERATION_CONFIG, generation_defaults
from llm_serving.errors import ConfigError
from llm_serving.models.spec import ModelSpec


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("config", help="check, document or import a configuration", allow_abbrev=False)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = add_command(
        subcommands, "check", run_check, "check a configuration; print the effective values and their sources"
    )
    add_config_arguments(check)
    add_command(subcommands, "reference", run_reference, "print a YAML with every key, its default and its meaning")
    importing = add_command(subcommands, "import", run_import, "write the config.json of MindIE-Service as a YAML")
    importing.add_argument("source", type=Path, metavar="CONFIG_JSON")
    importing.add_argument("--output", type=Path, metavar="YAML", help="new file; default: standard output")
    add_command(commands, "hash-key", run_hash_key, "read an API key and print its hash for `api_keys`")
    add_command(commands, "version", run_version, "print the version")


def run_check(arguments: argparse.Namespace) -> int:
    config = load(arguments)
    for model in config.models or (config,):
        check_weights(model)
        head = [f"# --- {model.model.model_name} ---"] if config.models else []
        lines = [*head, describe(model), *_tokens(model), *_sampling(model), *_memory(model), *_bounds(model)]
        lines += _guarantees(model)
        print("\n".join(lines), flush=True)
    return 0


def _tokens(config: ServingConfig) -> list[str]:
    path = config.model.model_path
    if path is None:
        return []
    from llm_serving.text.tokenizer.tokenizer import (
        Tokenizer,
        check_draft_vocabulary,
        describe_end_tokens,
        notice_of_unknown_tokens,
    )

    tokenizer = Tokenizer.load(path, config.model.tokenizer_path)
    if config.scheduler.draft_model_path is not None:
        check_draft_vocabulary(tokenizer, config.scheduler.draft_model_path)
    lines = ["# a text ends with:", *(f"#   - {line}" for line in describe_end_tokens(config.model, tokenizer))]
    notice = notice_of_unknown_tokens(tokenizer, ModelSpec.from_folder(path).vocab_size)
    return lines if notice is None else [*lines, f"# notice: {notice}"]


def _sampling(config: ServingConfig) -> list[str]:
    if config.model.generation_config == "none":
        return []
    defaults = generation_defaults(config.model.model_path)
    text = ", ".join(
        # seven digits, because the values are stored in single precision
        f"{name} {value:.7g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in defaults.items()
    )
    return [f"# defaults of requests ({GENERATION_CONFIG}): {text}"] if text else []


def _memory(config: ServingConfig) -> list[str]:
    if config.model.model_path is None:
        return []
    return ["# memory of a WorkAgent:", *(f"#   {line}" for line in stored_size(config).lines)]


def _guarantees(config: ServingConfig) -> list[str]:
    """Return YAML comments that say what `exactness` guarantees on Ascend, with and without optional packages."""
    exactness, model = config.device.exactness, config.model
    if config.device.device_target != "Ascend" or model.model_path is None:
        return []
    from llm_serving.worker.exactness import guarantees_on_ascend, has_experts_in_dtype

    network = ModelSpec.from_folder(model.model_path).network
    has_experts = has_experts_in_dtype(network, config.quant.quantization)
    is_native = model.implementation == "native" and model.mindir_path is None
    guarantees = guarantees_on_ascend(exactness, is_native=is_native, has_experts=has_experts)
    lines = (f"{installed}: {text}" if installed else text for installed, text in guarantees.items())
    return [f"# answers with device_config.exactness: {exactness}:", *(f"#   {line}" for line in lines)]


def _bounds(config: ServingConfig) -> list[str]:
    if config.pa.num_blocks is None:
        return []
    from llm_serving.engine.replica import build_scheduler

    spec = None if config.model.model_path is None else ModelSpec.from_folder(config.model.model_path)
    if spec is None:
        scheduler = build_scheduler(config, config.pa.num_blocks, config.pa.num_swap_blocks)
    else:
        layout, slots = config.served_spec(spec).layout, config.num_state_slots(spec.state_bytes)
        sizes = layout.num_blocks(config.pa.num_blocks), layout.num_blocks(config.pa.num_swap_blocks)
        scheduler = build_scheduler(config, *sizes, windows=layout.windows, num_state_slots=slots)
    return ["# bounds:", *(f"#   - {bounds}" for bounds in scheduler.bounds)]


def run_reference(arguments: argparse.Namespace) -> int:
    return _run_tool("print_reference", "reference", arguments)


def run_import(arguments: argparse.Namespace) -> int:
    return _run_tool("import_mindie", "import", arguments)


def _run_tool(module: str, command: str, arguments: argparse.Namespace) -> int:
    return int(import_optional(f"llm_serving_tools.commands.{module}", f"llm-serving config {command}").run(arguments))


def run_hash_key(arguments: argparse.Namespace) -> int:
    from llm_serving.server.middleware.authentication import hash_key

    # The key comes from standard input, because an argument stays in the shell's history and the list of processes.
    if sys.stdin is None:  # closed
        raise ConfigError("hash-key reads the API key from standard input, which is closed")
    key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if not API_KEY.fullmatch(key):
        raise ConfigError("an API key must be 16 to 512 printable ASCII characters without spaces")
    print(hash_key(key))
    return 0


def run_version(arguments: argparse.Namespace) -> int:
    print(f"llm-serving {__version__}")
    return 0
