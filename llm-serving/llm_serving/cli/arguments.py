"""Arguments that subcommands share, and functions that load the model named in them."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from llm_serving.config import ServingConfig, load_config
from llm_serving.config.loader import FlagOverride
from llm_serving.config.model_size import ModelSize, model_size
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.enums import KVCacheDtypeName, QuantizationName
from llm_serving.errors import ConfigError, LLMServingError, ModelError
from llm_serving.formats.folder import weight_files
from llm_serving.formats.gguf import files_of
from llm_serving.hub import download
from llm_serving.hub.base import missing_files
from llm_serving.models.gguf import is_gguf
from llm_serving.models.pooling import resolve_pooling
from llm_serving.models.weight_reader import check_folder

API_KEY: Final = re.compile(r"[!-~]{16,512}")
"""Pattern of API keys that may be hashed. A shorter key could be recovered from its hash."""
API_KEY_VARIABLE: Final = "LLM_SERVING_API_KEY"
TENANT: Final = "default"

_NO_PIPELINE: Final = "layers are not divided among devices; use --tensor-parallel-size or --data-parallel-size"
_NUMBERS: Final = ("N", "TOKENS")
EXIT_FAILED: Final = 1
Runner: TypeAlias = Callable[[argparse.Namespace], int]
Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class CommandFlag(NamedTuple):
    name: str
    key: str
    metavar: str
    help: str
    short: str = ""


class RefusedFlag(NamedTuple):
    """A flag of other servers. It is refused, except with a value in `accepted`, which this server obeys anyway."""

    name: str
    instead: str
    accepted: tuple[str, ...] = ()


FLAGS: Final = (
    CommandFlag("--host", "serving_config.server_ip", "ADDRESS", "address the HTTP server binds to"),
    CommandFlag("--port", "serving_config.server_port", "N", "port of the HTTP server"),
    CommandFlag("--served-model-name", "model_config.model_name", "NAME", "name of the model in the HTTP routes"),
    CommandFlag("--revision", "model_config.model_revision", "NAME", "branch, tag or commit of a model given by name"),
    CommandFlag("--tokenizer", "model_config.tokenizer_path", "PATH", "tokenizer file or folder"),
    CommandFlag("--dtype", "model_config.model_dtype", "TYPE", ", ".join(MODEL_DTYPES)),
    CommandFlag("--quantization", "quant_config.quantization", "NAME", ", ".join(QuantizationName)),
    CommandFlag("--kv-cache-dtype", "quant_config.kv_cache_dtype", "NAME", ", ".join(KVCacheDtypeName)),
    CommandFlag(
        "--max-model-len", "model_config.max_generate_length", "TOKENS", "maximum tokens of prompt and answer together"
    ),
    CommandFlag("--max-num-seqs", "model_config.decode_batch_size", "N", "maximum number of running requests"),
    CommandFlag(
        "--max-num-batched-tokens", "scheduler_config.max_prefill_tokens", "N", "maximum number of tokens of a step"
    ),
    CommandFlag("--block-size", "pa_config.block_size", "TOKENS", "tokens in a block of the KV cache"),
    CommandFlag(
        "--num-gpu-blocks-override", "pa_config.num_blocks", "N", "number of blocks in the KV cache of a WorkAgent"
    ),
    CommandFlag(
        "--tensor-parallel-size",
        "cluster_config.tensor_parallel",
        "N",
        "number of processes (ranks) of each replica",
        "-tp",
    ),
    CommandFlag(
        "--data-parallel-size", "cluster_config.replicas", "N", "number of replicas, each with a WorkAgent", "-dp"
    ),
    CommandFlag(
        "--ssl-certfile", "serving_config.ssl_certfile", "FILE", "certificate chain; the server then uses HTTPS"
    ),
    CommandFlag("--ssl-keyfile", "serving_config.ssl_keyfile", "FILE", "private key of the certificate"),
    CommandFlag("--log-level", "serving_config.log_level", "LEVEL", "minimum level of log lines"),
)
"""Flags and the YAML keys that they set. `--set KEY=VALUE` does the same; if both are given, the flag wins."""


REFUSED: Final = (
    RefusedFlag("--pipeline-parallel-size", _NO_PIPELINE, ("1",)),
    RefusedFlag("-pp", _NO_PIPELINE, ("1",)),
    RefusedFlag("--gpu-memory-utilization", "set the size instead: `--set device_config.max_device_memory=8GB`"),
    RefusedFlag("--kv-cache-memory-bytes", "set the number of blocks instead: `--set pa_config.num_blocks=N`"),
    RefusedFlag("--swap-space", "set the number of blocks instead: `--set pa_config.num_swap_blocks=N`"),
    RefusedFlag("--device", "use `--set device_config.device_target=CPU` (or Ascend)", ("cpu", "auto")),
    RefusedFlag(
        "--enable-prefix-caching",
        "prefix caching is on; `--set scheduler_config.prefix_caching=False` disables it",
        ("",),
    ),
    RefusedFlag("--no-enable-prefix-caching", "use `--set scheduler_config.prefix_caching=False`"),
    RefusedFlag(
        "--enable-chunked-prefill",
        "it is always on; `--set scheduler_config.max_prefill_tokens=N` sets the token budget",
        ("",),
    ),
    RefusedFlag("--scheduling-policy", "use `--set scheduler_config.policy=NAME`"),
    RefusedFlag("--max-waiting", "use `--set scheduler_config.max_waiting_queue=N`"),
    RefusedFlag("--load-format", "weights are read from *.safetensors", ("auto", "safetensors")),
    RefusedFlag("--trust-remote-code", "the server never runs code of a model folder"),
    RefusedFlag("--chat-template", "the template is read from the model folder's tokenizer_config.json"),
)


class StartError(LLMServingError):
    """The server exited before it was ready. `message` is the end of its log."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def add_command(commands: Subcommands, name: str, run: Runner, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags that set a YAML key (they override --set)")
    for flag in FLAGS:
        names = [flag.name, flag.short] if flag.short else [flag.name]
        group.add_argument(*names, metavar=flag.metavar, help=f"{flag.help} ({flag.key})")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key that clients must send, of tenant `{TENANT}`; only its hash is kept. Other users of the machine "
        f"see it: prefer the variable {API_KEY_VARIABLE}, which applies without this flag and without `api_keys`",
    )
    for refused in REFUSED:
        group.add_argument(refused.name, nargs="?", const="", help=argparse.SUPPRESS)


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """Return the flags as texts `section.key=value`. Raise ConfigError, with an alternative, if a flag is refused."""
    for refused in REFUSED:
        value = _value(arguments, refused.name)
        if value is not None and value not in refused.accepted:
            given = f" {value}" if value else ""
            raise ConfigError(f"{refused.name}{given} is not supported: {refused.instead}")
    overrides: list[str] = []
    for flag in FLAGS:
        value = _value(arguments, flag.name)
        if value is None or (flag.name == "--dtype" and value == "auto"):
            continue
        number = re.fullmatch(r"-?(0|[1-9][0-9]*)", value)  # 010 stays a string: YAML would read 8
        override = FlagOverride(f"{flag.key}={value if number and flag.metavar in _NUMBERS else json.dumps(value)}")
        override.flag = flag.name
        overrides.append(override)
    if arguments.api_key is not None:
        overrides.append(_key_override(arguments.api_key, "--api-key"))
    return overrides


def overrides_of_environment(config: ServingConfig) -> list[str]:
    """Return the environment's API key as [`section.key=value`], or [] if it is missing or keys are configured."""
    key = os.environ.get(API_KEY_VARIABLE)
    return [_key_override(key, API_KEY_VARIABLE)] if key and not config.api_keys else []


def _key_override(key: str, source: str) -> str:
    from llm_serving.server.middleware.authentication import hash_key

    if not API_KEY.fullmatch(key):
        raise ConfigError(f"{source}: an API key must be 16 to 512 printable ASCII characters without spaces")
    return f"api_keys.{TENANT}.key_sha256={json.dumps(hash_key(key))}"


def _value(arguments: argparse.Namespace, name: str) -> str | None:
    value: str | None = getattr(arguments, name.lstrip("-").replace("-", "_"))
    return value


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
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


def load(arguments: argparse.Namespace) -> ServingConfig:
    """Load the configuration. Add the flags and the environment's API key to `arguments.overrides`."""
    arguments.overrides += overrides_of(arguments)
    config = load_config(arguments.config, arguments.overrides, arguments.model)
    if added := overrides_of_environment(config):
        arguments.overrides += added
        config = load_config(arguments.config, arguments.overrides, arguments.model)
    return config


def load_servable(arguments: argparse.Namespace) -> ServingConfig:
    """Load the configuration of a model, and download missing weights. Raise ConfigError if it cannot be served."""
    config = load(arguments)
    if config.model.model_path is None:
        rule = config.model_hint or "pass --model FOLDER (or --model demo), or set model_config.model_path"
        raise ConfigError(f"no model to serve: {rule}")
    for model in config.models or (config,):
        if model.load_at_start:
            get_weights(model, say)
        check_weights(model)
    return config


def say(text: str) -> None:
    """Print a message to standard error, because programs read results from standard output."""
    print(text, file=sys.stderr, flush=True)


def stored_size(config: ServingConfig) -> ModelSize:
    if config.hub_model is not None:
        return model_size(config, sum(config.hub_model.weight_sizes.values()))
    path = config.model.folder
    try:
        files = files_of(path) if is_gguf(path) else weight_files(path)
    except ModelError:  # loading the model reports the same error
        return model_size(config, None)
    return model_size(config, sum(file.stat().st_size for file in files))


def get_weights(config: ServingConfig, say: Callable[[str], None]) -> None:
    """Report the memory that a model needs, and download the model. Raise ConfigError if the model is too large."""
    model = config.hub_model
    if model is None:
        return
    if model.sizes is None:
        say(model.source)
        return
    size = stored_size(config)
    say("\n".join([f"{model.name}:", *(f"  {line}" for line in size.lines)]))
    if not size.fits:
        verdict = size.lines[-1].split(maxsplit=1)[1]
        raise ConfigError(
            f"{model.name} is not downloaded, because it does not fit into memory: {verdict}. Raise "
            "device_config.max_device_memory, reduce pa_config.num_blocks, or choose a smaller model"
        )
    download(model, say)


def check_weights(config: ServingConfig) -> None:
    """Check that a WorkAgent can load the model folder, without reading the weights. Raise ModelError if it cannot."""
    model = config.hub_model
    complete = model is None or not missing_files(model.folder)
    if config.model.model_path is not None and complete:
        spec = check_folder(config.model.model_path)
        resolve_pooling(config.model.pooling, config.model.model_path, spec)
