"""Accept a device: precision, right answers, long contexts, time of steps, restarts and load, in a Markdown report.

    scripts/ascend_acceptance.sh --model FOLDER            on a machine with an NPU
    scripts/ascend_acceptance.sh --device cpu --rate 3 --seconds 5 --families llama2 qwen3      a rehearsal

Exit status: 0 if every part passed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from acceptance.device import answers, environment, load, long_context, precision, step_time
from acceptance.device.outcome import Outcome, PartError, report
from acceptance.device.server import Answer, Server, serving
from llm_serving.config import load_config
from llm_serving.config.paths import DEMO_WORD
from llm_serving.config.schema import ServingConfig
from llm_serving.models.spec import ModelSpec

PARTS = ("environment", "precision", "answers", "contexts", "steps", "bytes", "kill", "load")
OF_MODEL = PARTS[3:]
"""Parts that a server of the given model answers."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="ascend", choices=("ascend", "cpu"))
    parser.add_argument("--model", default=DEMO_WORD, help="folder, or demo; the contest's is Llama-2-7B")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--exactness", default="exact", choices=("exact", "fast"))
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second of the load test")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the load test")
    parser.add_argument("--requests", type=int, default=48, help="that are compared alone and under load")
    parser.add_argument("--families", nargs="*", default=[], metavar="NAME", help="models of precision; default: all")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the server's configuration")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="of the device's memory, for the time of a step"
    )
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of the device's 16-bit products, likewise")
    parser.add_argument("--report", type=Path, default=Path("ascend_acceptance.md"))
    parser.add_argument(
        "--logs", type=Path, default=Path("ascend_acceptance_logs"), help="folder; an existing one is renamed"
    )
    arguments = parser.parse_args(argv)
    title = f"Acceptance of {arguments.device}, model {arguments.model}, {arguments.dtype}"
    outcomes = []
    for outcome in parts(arguments, sys.argv if argv is None else argv):
        print(f"{outcome.title}: {outcome.verdict}", file=sys.stderr, flush=True)
        for fault in outcome.faults:
            print(f"  {fault}", file=sys.stderr, flush=True)
        outcomes.append(outcome)
        arguments.report.write_text(report(title, outcomes))  # after each part, because a device may crash the process
    print(f"report: {arguments.report}", file=sys.stderr)
    return int(any(each.faults for each in outcomes))


def parts(arguments: argparse.Namespace, command: Sequence[str] = ()) -> Iterator[Outcome]:
    """Yield the outcomes of the parts in order; a failed part does not stop the next one."""
    chosen, logs = arguments.parts, new_folder(arguments.logs)
    settings = [
        f"device_config.device_target={'Ascend' if arguments.device == 'ascend' else 'CPU'}",
        f"device_config.kernels={'auto' if arguments.device == 'ascend' else 'primitives'}",
        f"device_config.exactness={arguments.exactness}",
        f"model_config.model_dtype={arguments.dtype}",
        *arguments.set,
    ]
    if "environment" in chosen:
        yield attempt(environment.TITLE, lambda: environment.examine(arguments.device, command))
    if "precision" in chosen:
        yield attempt(precision.TITLE, lambda: precision.examine(arguments.families, settings, logs))
    plans = [(DEMO_WORD, ["answers"]), (arguments.model, [each for each in OF_MODEL if each in chosen])]
    if arguments.model == DEMO_WORD:
        plans = [(DEMO_WORD, ["answers", *plans[1][1]])]
    for number, (model, parts_of_model) in enumerate(plans):
        if any(each in chosen for each in parts_of_model):
            try:
                config = load_config(None, settings, model)
                given = ["--model", model, *(text for each in settings for text in ("--set", each))]
                with serving(given, logs / f"server-{number}") as server:
                    yield from of_server(server, config, [each for each in parts_of_model if each in chosen], arguments)
            except (PartError, ValueError) as failure:
                yield Outcome.failed(f"Server of {model}", str(failure))
    yield attempt(environment.WARNINGS, lambda: environment.warnings_of(logs))


def of_server(
    server: Server, config: ServingConfig, parts_of_model: Sequence[str], arguments: argparse.Namespace
) -> Iterator[Outcome]:
    """Yield the outcomes of the parts that need a server."""
    assert config.model.model_path is not None
    spec = ModelSpec.from_folder(config.model.model_path)
    reference: list[Answer] = []
    if "answers" in parts_of_model:
        yield attempt(answers.RIGHT, lambda: answers.right(server))
    if "contexts" in parts_of_model:
        yield attempt(long_context.TITLE, lambda: long_context.examine(server, arguments.dtype, spec.vocab_size))
    if "steps" in parts_of_model:
        yield attempt(step_time.TITLE, lambda: step_time.examine(server, spec, config, device(arguments)))
    if "bytes" in parts_of_model or "kill" in parts_of_model:
        yield attempt(answers.SAME_BYTES, lambda: answers.same_bytes(server, arguments.requests, reference))
    if "kill" in parts_of_model:
        yield attempt(answers.KILL, lambda: answers.killed(server, reference))
    if "load" in parts_of_model:
        folder = server.folder / "load"
        folder.mkdir()
        options = server.port, arguments.rate, arguments.seconds, folder, is_contest_model(spec)
        yield attempt(load.TITLE, lambda: load.examine(*options))


def is_contest_model(spec: ModelSpec) -> bool:
    """Return whether a model has the size of Llama-2-7B."""
    return (spec.network.hidden, len(spec.caches), spec.vocab_size) == (4096, 32, 32000)


def device(arguments: argparse.Namespace) -> step_time.Device:
    """Return the limits of the device, those on the command line first."""
    if arguments.device == "cpu":
        found = step_time.measured_host()
    else:
        found = step_time.device_of("\n".join(environment.listed("npu-smi") or ()))
    given = {
        "bandwidth": arguments.bandwidth and arguments.bandwidth * 1e9,
        "peak": arguments.peak and arguments.peak * 1e12,
    }
    return dataclasses.replace(found, **{name: value for name, value in given.items() if value})


def new_folder(path: Path) -> Path:
    """Create a folder and return its absolute path. An existing folder is renamed first, by its time of change."""
    if path.exists():
        path.rename(path.with_name(f"{path.name}.{int(path.stat().st_mtime)}"))
    path.mkdir(parents=True)
    return path.resolve()


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
