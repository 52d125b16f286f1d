"""The console command `llm-serving`: its subcommands and its exit codes."""

from __future__ import annotations

import argparse
import errno
import io
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm_serving.cli import config, serve
from llm_serving.cli.arguments import EXIT_FAILED, StartError, Subcommands
from llm_serving.config.rules import nearest
from llm_serving.core.process import import_optional
from llm_serving.errors import ConfigError, LLMServingError, NoWorkAgentsError

SIMULATOR: Final = "llm_serving_simulator.commands"
RECEIPTS: Final = "llm_serving_receipts"
TOOLS: Final = "llm_serving_tools.commands"


@dataclass(frozen=True)
class PackageCommand:
    """A subcommand of another package, imported only when it is called."""

    name: str
    package: str
    help: str

    def add_to(self, commands: Subcommands) -> None:
        module = import_optional(f"{self.package}.{self.name.replace('-', '_')}", f"llm-serving {self.name}")
        parser = commands.add_parser(self.name, help=self.help, allow_abbrev=False)
        module.add_arguments(parser)


COMMANDS: Final = (
    serve,
    PackageCommand("start", TOOLS, "serve in the background; return when the server is ready"),
    PackageCommand("stop", TOOLS, "stop servers that `start` started"),
    PackageCommand("run-batch", TOOLS, "answer a file of requests without a server; an interrupted run is resumed"),
    PackageCommand("verify", RECEIPTS, "compute the responses of receipts again and report differences"),
    PackageCommand("models", TOOLS, "list the models in the local caches, or show the memory that a model needs"),
    PackageCommand("convert", TOOLS, "write a model in the format of Hugging Face or MindFormers"),
    PackageCommand("export", TOOLS, "write the graphs of a model, for backend ge; needs no device"),
    PackageCommand("quantize", TOOLS, "write a model with weights of 8 or 4 bits, as compressed-tensors does"),
    PackageCommand("replay", TOOLS, "repeat the scheduler decisions of a recording and compare them"),
    PackageCommand("profile", SIMULATOR, "measure step times on this machine, for whatif and tune"),
    PackageCommand(
        "whatif", SIMULATOR, "simulate configurations on a workload, with the server's scheduler and a virtual clock"
    ),
    PackageCommand("tune", SIMULATOR, "find by simulation the configuration that meets an objective best"),
    PackageCommand("chat", TOOLS, "chat with a running server in the terminal"),
    PackageCommand("cluster", TOOLS, "show a cluster, drain replicas and let drained replicas join again"),
    PackageCommand(
        "reload", TOOLS, "make a running server read its YAML again: limits, keys, classes, policy and budgets"
    ),
    PackageCommand("timeline", TOOLS, "save the newest steps of a running server as a trace for ui.perfetto.dev"),
    PackageCommand(
        "advice", SIMULATOR, "ask a server which configuration would have suited its recent requests better"
    ),
    config,
)

EXIT_CONFIG: Final = 2
EXIT_NO_WORK_AGENTS: Final = 3
EXIT_INTERRUPTED: Final = 130
DISK_ERRORS: Final = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC})
EXIT_CODES: Final = """\
exit codes:
  0    done; a server: ended by SIGINT or SIGTERM
  1    serving failed, a replay differs from its recording, or an answer from its receipt
  2    wrong arguments or configuration: a model that cannot be loaded, a port in use, a receipt that cannot be read
  3    every WorkAgent has used up its restarts (serving_config.exit_without_work_agents)
  130  interrupted by Ctrl-C before the command could clean up
`start` ends with the exit code of its server if that ends before it is ready.
"""


def main(argv: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    try:
        given = sys.argv[1:] if argv is None else argv
        arguments = _parser(next((each for each in given if not each.startswith("-")), "")).parse_args(given)
        _allow_every_character()
        code = int(arguments.run(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ConfigError as error:
        return _failed(error, EXIT_CONFIG)
    except NoWorkAgentsError as error:
        return _failed(error, EXIT_NO_WORK_AGENTS)
    except StartError as error:
        return _failed(error, error.exit_code if error.exit_code > 0 else EXIT_FAILED)
    except LLMServingError as error:
        return _failed(error, EXIT_FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if sys.stdout is None or not _is_closed_by_reader(sys.stdout.fileno()):
            raise
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is not None:
            raise
        _discard_output()
        return _failed(LLMServingError(f"standard output cannot be written: {error.strerror}"), EXIT_FAILED)


def _open_standard_streams() -> None:
    """Open closed standard streams on /dev/null. uvloop aborts if a socket gets descriptor 0, 1 or 2."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # `open` uses the lowest free descriptor


def _allow_every_character() -> None:
    """Escape characters that the encoding of standard output lacks, instead of raising an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _is_closed_by_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _discard_output() -> None:
    """Discard buffered output. Otherwise Python writes it at exit and prints a traceback."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _failed(error: LLMServingError, exit_code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return exit_code


class _CommandParser(argparse.ArgumentParser):
    """A parser whose error for an unknown flag names the nearest known one. Its subcommands have the same class."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = next((each.partition("=")[0] for each in unknown if each.startswith("-") and each != "--"), None)
            hint = "" if flag is None else f"; {nearest(flag, list(self._option_string_actions))}"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown


def _parser(called: str | None = None) -> argparse.ArgumentParser:
    """Build the parser. Import a subcommand of another package only if `called` is its name or None."""
    parser: argparse.ArgumentParser = _CommandParser(
        prog="llm-serving",
        description="LLM serving on MindSpore.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for each in COMMANDS:
        if isinstance(each, PackageCommand) and called not in (None, each.name):
            commands.add_parser(each.name, help=each.help)
        else:
            each.add_to(commands)
    _describe(parser)
    return parser


def _describe(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                command = action.choices[choice.dest]
                command.description = command.description or choice.help
                _describe(command)
