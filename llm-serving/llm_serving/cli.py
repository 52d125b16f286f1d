"""The console command `llm-serving` and its subcommands."""

import argparse
import contextlib
import getpass
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llm_serving import __version__, launcher
from llm_serving.config import ServingConfig, load_config
from llm_serving.config.paths import REFERENCE_YAML
from llm_serving.config.report import describe
from llm_serving.errors import ConfigError, LLMServingError, ModelError, NoWorkAgentsError, RecordingError
from llm_serving.flags import API_KEY, API_KEY_VARIABLE, add_flags, overrides_of, overrides_of_environment
from llm_serving.log import configure_logging, get_logger
from llm_serving.model_command import cached_table, check_weights, get_weights, stored_size
from llm_serving.server.authentication import hash_key
from llm_serving.trace_file import save_timeline

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_NO_WORK_AGENTS = 3
EXIT_INTERRUPTED = 130
EXIT_CODES = """\
exit codes:
  0    done; a server: ended in order by SIGINT or SIGTERM
  1    serving failed, a replay differs from its recording, or an answer from its receipt
  2    wrong arguments or configuration: a model that cannot be loaded, a port in use, a receipt that cannot be read
  3    every WorkAgent has used up its restarts (serving_config.exit_without_work_agents)
  130  interrupted by Ctrl-C before there was anything to end in order
`start` answers as the server that it started, if that ends before it is ready.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code, one of `EXIT_CODES`.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except NoWorkAgentsError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NO_WORK_AGENTS
    except launcher.StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if error.exit_code > 0 else EXIT_FAILED
    except LLMServingError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llm-serving",
        description="LLM serving on MindSpore.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="run the master, its WorkAgents and the HTTP server until interrupted", allow_abbrev=False
    )
    _add_config_arguments(serve)
    serve.set_defaults(run=_serve)

    start = commands.add_parser(
        "start", help="serve in the background; returns when requests are answered", allow_abbrev=False
    )
    _add_config_arguments(start)
    _add_run_dir_argument(start)
    start.set_defaults(run=_start)

    stop = commands.add_parser("stop", help="end what `start` started", allow_abbrev=False)
    stop.add_argument("--port", type=int, metavar="N", help="only the server on this port")
    _add_run_dir_argument(stop)
    stop.set_defaults(run=_stop)

    batch = commands.add_parser(
        "run-batch",
        help="answer a file of requests without a server; a run that ends early goes on",
        allow_abbrev=False,
    )
    batch.add_argument("source", type=Path, metavar="IN", help="JSON lines: custom_id, method, url, body")
    batch.add_argument(
        "target", type=Path, metavar="OUT", help="gets the answers in their order; OUT.errors the others"
    )
    _add_config_arguments(batch)
    batch.set_defaults(run=_run_batch)

    verify = commands.add_parser(
        "verify", help="compute the answers of receipts again, alone, and say what differs", allow_abbrev=False
    )
    verify.add_argument(
        "file",
        type=Path,
        metavar="RECEIPT",
        help="JSON or JSON lines: receipts, or answers with one; - is stdin",
    )
    _add_config_arguments(verify)
    verify.set_defaults(run=_verify)

    models = commands.add_parser(
        "models", help="list the models of the local caches, or what one takes and whether it fits", allow_abbrev=False
    )
    models.add_argument("name", nargs="?", metavar="MODEL", help="folder or name; only its configuration is downloaded")
    models.set_defaults(run=_models)

    converting = commands.add_parser(
        "convert", help="write a model in the form of Hugging Face or of MindFormers", allow_abbrev=False
    )
    converting.add_argument("source", type=Path, metavar="SOURCE", help="folder, or one *.safetensors or *.ckpt")
    converting.add_argument("target", type=Path, metavar="OUT", help="folder that does not exist")
    converting.add_argument("--to", required=True, choices=("hf", "mindformers"), help="whose names the tensors get")
    converting.add_argument("--files", default="safetensors", choices=("safetensors", "ckpt"))
    converting.add_argument(
        "--joined", choices=("grouped", "stacked"), help="rows of w_qkv: grouped = MindFormers 1.4 and newer"
    )
    converting.add_argument("--config", type=Path, metavar="YAML", help="MindFormers YAML, for lack of a config.json")
    converting.set_defaults(run=_convert)

    quantizing = commands.add_parser(
        "quantize", help="write a model with weights of 8 or 4 bits, as compressed-tensors does", allow_abbrev=False
    )
    quantizing.add_argument("source", type=Path, metavar="FOLDER", help="folder of a model that is not quantised")
    quantizing.add_argument("target", type=Path, metavar="OUT", help="folder that does not exist")
    quantizing.add_argument(
        "--format",
        required=True,
        choices=("w8a8", "w8a16", "w4a16"),
        help="bits of weights and of activations; w8: a scale for each row",
    )
    quantizing.add_argument(
        "--group-size", type=int, metavar="N", help="columns that share a scale, of w4a16; default 128"
    )
    quantizing.set_defaults(run=_quantize)

    replay = commands.add_parser(
        "replay", help="run the scheduler on a recording; it must decide the same", allow_abbrev=False
    )
    replay.add_argument("file", type=Path, metavar="FILE", help="of the folder scheduler_config.record_path")
    replay.add_argument("--until", type=int, metavar="N", help="stop after the decision of step N")
    replay.add_argument("--explain", action="store_true", help="show the state and the decision where the replay stops")
    replay.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="also write a file for a browser in which the newest steps are gone through",
    )
    replay.set_defaults(run=_replay)

    timeline = commands.add_parser(
        "timeline", help="save what a running server did lately as a trace for ui.perfetto.dev", allow_abbrev=False
    )
    timeline.add_argument(
        "--url",
        default="http://127.0.0.1:8835",
        help="of the server; its API key, if it wants one, in the environment variable LLM_SERVING_API_KEY",
    )
    timeline.add_argument("--output", type=Path, default=Path("trace.json"), metavar="FILE")
    timeline.add_argument("--steps", type=int, metavar="N", help="only the newest N steps")
    timeline.set_defaults(run=_timeline)

    chatting = commands.add_parser("chat", help="talk with a running server in the terminal", allow_abbrev=False)
    chatting.add_argument("--url", default="http://127.0.0.1:8835", help="of the server")
    chatting.add_argument(
        "--api-key", metavar="KEY", default="", help=f"better in the environment variable {API_KEY_VARIABLE}"
    )
    chatting.add_argument("--model", metavar="NAME", default="", help="name that requests give; default: none")
    chatting.add_argument("--system", metavar="TEXT", default="", help="said before the conversation")
    chatting.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="parameters", help="a parameter of requests"
    )
    chatting.set_defaults(run=_chat)

    config = commands.add_parser("config", help="work with a configuration", allow_abbrev=False)
    config_commands = config.add_subparsers(required=True, metavar="COMMAND")
    check = config_commands.add_parser(
        "check", help="print the effective values and where each came from", allow_abbrev=False
    )
    _add_config_arguments(check)
    check.set_defaults(run=_check)
    reference = config_commands.add_parser(
        "reference", help="print a YAML with every key, its default and its meaning", allow_abbrev=False
    )
    reference.set_defaults(run=_reference)
    importing = config_commands.add_parser(
        "import", help="write the config.json of MindIE-Service as a YAML", allow_abbrev=False
    )
    importing.add_argument("source", type=Path, metavar="CONFIG_JSON")
    importing.add_argument("--output", type=Path, metavar="YAML", help="new file; default: standard output")
    importing.set_defaults(run=_import)

    hash_key = commands.add_parser(
        "hash-key", help="read an API key and print what `api_keys` has in its place", allow_abbrev=False
    )
    hash_key.set_defaults(run=_hash_key)

    version = commands.add_parser("version", help="print the version", allow_abbrev=False)
    version.set_defaults(run=_version)
    return parser


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
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


def _add_run_dir_argument(parser: argparse.ArgumentParser) -> None:
    help_text = "where pids and logs of background servers are kept"
    parser.add_argument("--run-dir", type=Path, default=Path(".run"), metavar="FOLDER", help=help_text)


def _load(arguments: argparse.Namespace) -> ServingConfig:
    """The configuration; `arguments.overrides` then has what the flags and the environment add to it."""
    arguments.overrides += overrides_of(arguments)
    config = load_config(arguments.config, arguments.overrides, arguments.model)
    if added := overrides_of_environment(config):
        arguments.overrides += added
        config = load_config(arguments.config, arguments.overrides, arguments.model)
    return config


def _load_servable(arguments: argparse.Namespace) -> ServingConfig:
    config = _load(arguments)
    if config.model.model_path is None:
        raise ConfigError("no model to serve: pass --model FOLDER (or --model demo), or set model_config.model_path")
    get_weights(config, _say)
    check_weights(config)
    return config


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _serve(arguments: argparse.Namespace) -> int:
    config = _load_servable(arguments)
    configure_logging(config.serving.log_level, "master")
    for notice in config.notices:
        get_logger(__name__).warning(notice)
    # Imported here so that `config check` and `version` answer at once.
    from llm_serving import master

    return int(master.run(config))


def _run_batch(arguments: argparse.Namespace) -> int:
    if not arguments.source.is_file():
        raise ConfigError(f"{arguments.source}: no such file")
    config = _load_servable(arguments)
    configure_logging(config.serving.log_level, "master")
    from llm_serving import master

    counts = master.run_batch(config, arguments.source, arguments.target)
    _say(f"{arguments.target}: {counts.completed} of {counts.total} lines answered, {counts.failed} refused or failed")
    return EXIT_FAILED if counts.failed else 0


def _verify(arguments: argparse.Namespace) -> int:
    from llm_serving.verify_command import verify_file

    config, overrides = _load_servable(arguments), list(arguments.overrides)
    configure_logging("WARNING", "verify")

    def load(more: Sequence[str]) -> ServingConfig:
        return load_config(arguments.config, [*overrides, *more], arguments.model) if more else config

    return verify_file(arguments.file, load, _say, print)


def _start(arguments: argparse.Namespace) -> int:
    config = _load_servable(arguments)
    return launcher.start(config, _serve_arguments(arguments), arguments.run_dir)


def _serve_arguments(arguments: argparse.Namespace) -> list[str]:
    """The arguments of `serve` that mean the same; of a key they have the hash."""
    pairs = [("--config", arguments.config), ("--model", arguments.model)]
    pairs += [("--set", override) for override in arguments.overrides]
    return [text for name, value in pairs if value is not None for text in (name, str(value))]


def _stop(arguments: argparse.Namespace) -> int:
    return launcher.stop(arguments.run_dir, arguments.port)


def _check(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    check_weights(config)
    text = "\n".join([describe(config), *_ends(config), *_memory(config), *_bounds(config)])
    with contextlib.suppress(BrokenPipeError):  # the reader, such as `head`, may leave early
        print(text, flush=True)
    return 0


def _reference(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(REFERENCE_YAML.read_text(encoding="utf-8"), end="", flush=True)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from llm_serving.config.mindie import import_mindie

    imported = import_mindie(arguments.source)
    for note in imported.notes:
        _say(f"notice: {note}")
    text = imported.as_yaml(arguments.source.name)
    if arguments.output is None:
        print(text, end="", flush=True)
        return 0
    try:
        with arguments.output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{arguments.output}: {error.strerror or error}") from None
    _say(f"{arguments.output}: done")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from llm_serving.recording.records import Reader
    from llm_serving.recording.replay import Replay
    from llm_serving.recording.story import Story

    try:
        with arguments.file.open("rb") as file:
            reader = Reader(file)
            replay = Replay(reader)
            story = Story(replay.scheduler)
            if arguments.html is not None:
                replay.on_decision = story.decided
            began = time.perf_counter()
            replay.run(arguments.until, explain=arguments.explain)
            seconds = time.perf_counter() - began
    except OSError as error:
        raise ConfigError(f"{arguments.file}: {error.strerror or error}") from None
    except RecordingError as error:
        raise RecordingError(f"{arguments.file}: {error}") from error
    if arguments.html is not None:
        from llm_serving.server.replay_page import write_replay_page

        told = story.told(reader.header.name, reader.header.version)
        write_replay_page(told, arguments.html)
        _say(
            f"{arguments.html}: {len(told.steps)} steps, {told.num_left_out} before them left out; open it in a browser"
        )
    if replay.explanation:
        print(replay.explanation, end="\n\n")
    print(f"{reader.header.name}, recorded by version {reader.header.version}")
    if reader.torn_at is not None:
        print(f"the last record, at byte {reader.torn_at}, is not complete: the recording was cut off there")
    rate = replay.num_decisions / seconds if seconds else 0.0
    print(
        f"steps {replay.first_step} to {replay.next_step - 1}: {replay.num_events} events, {replay.num_decisions}"
        f" decisions in {seconds:.3f} s, {rate:.0f} decisions/s"
    )
    print(f"every decision is the recorded one; hash {replay.hash}")
    return 0


def _models(arguments: argparse.Namespace) -> int:
    lines = list(cached_table())
    if arguments.name is not None:
        config = load_config(model=arguments.name)
        lines = [*stored_size(config).lines, *(f"notice: {notice}" for notice in config.notices)]
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)
    return 0


def _ends(config: ServingConfig) -> list[str]:
    """The tokens that end a text and who says so, as comments."""
    if config.model.model_path is None:
        return []
    from llm_serving.text.end_tokens import describe_end_tokens

    try:
        lines = describe_end_tokens(config.model)
    except ModelError as error:  # folders without a tokenizer have a configuration all the same
        lines = [f"unknown, and no server starts: {error}"]
    return ["# a text ends with:", *(f"#   - {line}" for line in lines)]


def _convert(arguments: argparse.Namespace) -> int:
    from llm_serving.convert_command import convert

    joined, yaml = arguments.joined, arguments.config
    convert(arguments.source, arguments.target, arguments.to, files=arguments.files, order=joined, yaml=yaml)
    _say(f"{arguments.target}: done")
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    from llm_serving.quantize_command import quantize

    quantize(arguments.source, arguments.target, arguments.format, arguments.group_size)
    _say(f"{arguments.target}: done")
    return 0


def _memory(config: ServingConfig) -> list[str]:
    """What the model takes, as comments."""
    if config.model.model_path is None:
        return []
    return ["# memory of a WorkAgent:", *(f"#   {line}" for line in stored_size(config).lines)]


def _bounds(config: ServingConfig) -> list[str]:
    """How long a request of each class can be made to wait, as comments; it follows from the size of the cache."""
    if config.pa.num_blocks is None:
        return []
    from llm_serving.engine.replica import build_scheduler
    from llm_serving.models.spec import ModelSpec

    window = None if config.model.model_path is None else ModelSpec.from_folder(config.model.model_path).window
    scheduler = build_scheduler(config, config.pa.num_blocks, config.pa.num_swap_blocks, window=window)
    return ["# bounds:", *(f"#   - {bounds}" for bounds in scheduler.bounds)]


def _hash_key(arguments: argparse.Namespace) -> int:
    # From standard input: an argument would stay in the shell's history and in the list of processes.
    key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if not API_KEY.fullmatch(key):
        raise ConfigError("an API key must be 16 to 512 printable ASCII characters without spaces")
    print(hash_key(key))
    return 0


def _timeline(arguments: argparse.Namespace) -> int:
    num_events = save_timeline(arguments.url, arguments.output, arguments.steps)
    print(f"{arguments.output}: {num_events} events; open it at https://ui.perfetto.dev")
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from llm_serving.chat_client import ChatClient
    from llm_serving.chat_command import chat, read_value

    parameters = {}
    for given in arguments.parameters:
        name, found, value = given.partition("=")
        if not found:
            raise ConfigError(f"--set must be NAME=VALUE. Given: {given}")
        parameters[name] = read_value(value)
    key = arguments.api_key or os.environ.get(API_KEY_VARIABLE, "")
    chat(ChatClient(arguments.url, key, arguments.model, arguments.system, parameters))
    return 0


def _version(arguments: argparse.Namespace) -> int:
    print(f"llm-serving {__version__}")
    return 0
