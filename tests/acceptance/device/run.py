"""Accept a device: environment, precision, equal bytes, kill and restart, load; write one Markdown report.

    scripts/ascend_acceptance.sh --model FOLDER            on a machine with an NPU
    scripts/ascend_acceptance.sh --device cpu --rate 3 --seconds 5 --families llama2 qwen3      a rehearsal

Exit status: 0 if every part passed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from acceptance.device import answers, environment, load, precision
from acceptance.device.outcome import Outcome, PartError, report
from acceptance.device.server import serving


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="ascend", choices=("ascend", "cpu"))
    parser.add_argument("--model", default="demo", help="folder, or demo; the contest's is Llama-2-7B")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--exactness", default="exact", choices=("exact", "fast"))
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second of the load test")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the load test")
    parser.add_argument("--requests", type=int, default=48, help="that are compared alone and under load")
    parser.add_argument("--families", nargs="*", default=[], metavar="NAME", help="models of precision; default: all")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the server's configuration")
    parser.add_argument("--report", type=Path, default=Path("ascend_acceptance.md"))
    arguments = parser.parse_args(argv)
    title = f"Acceptance of {arguments.device}, model {arguments.model}, {arguments.dtype}"
    outcomes = []
    for outcome in parts(arguments):
        print(f"{outcome.title}: {outcome.verdict}", file=sys.stderr, flush=True)
        for fault in outcome.faults:
            print(f"  {fault}", file=sys.stderr, flush=True)
        outcomes.append(outcome)
        arguments.report.write_text(report(title, outcomes))  # after each part, because a device may crash the process
    print(f"report: {arguments.report}", file=sys.stderr)
    return int(any(each.faults for each in outcomes))


def parts(arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcomes of the parts in order; a failed part does not stop the next one."""
    yield attempt(environment.TITLE, lambda: environment.examine(arguments.device))
    yield attempt(precision.TITLE, lambda: precision.examine(arguments.device, arguments.families))
    settings = [
        f"device_config.device_target={'Ascend' if arguments.device == 'ascend' else 'CPU'}",
        f"device_config.kernels={'auto' if arguments.device == 'ascend' else 'primitives'}",
        f"device_config.exactness={arguments.exactness}",
        f"model_config.model_dtype={arguments.dtype}",
        *arguments.set,
    ]
    try:
        with serving(["--model", arguments.model, *(text for each in settings for text in ("--set", each))]) as server:
            reference: list[str] = []
            yield attempt(answers.SAME_BYTES, lambda: answers.same_bytes(server, arguments.requests, reference))
            yield attempt(answers.KILL, lambda: answers.killed(server, reference))
            with tempfile.TemporaryDirectory() as folder:
                options = server.port, arguments.rate, arguments.seconds, Path(folder)
                yield attempt(load.TITLE, lambda: load.examine(*options))
    except PartError as failure:
        yield Outcome.failed("Server", str(failure))


def attempt(title: str, part: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of a part; any error is a fault of that part."""
    try:
        return part()
    except PartError as failure:
        return Outcome.failed(title, str(failure))
    except Exception as error:  # noqa: BLE001  the next part must run
        return Outcome.failed(title, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
