"""Compare logits of small models of every family with NumPy, in the number format and with the kernels that serve.

    PYTHONPATH=tests python -m acceptance.device.precision NAME [--set SECTION.KEY=VALUE ...]

Prints one line of JSON about a model. Each model has a process of its own, because a failing device crashes it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from acceptance.device.outcome import Outcome, reason, table

TITLE = "Precision"
LIMITS = {"float16": 0.015, "bfloat16": 0.12}
"""Maximum error relative to the largest logit. On a CPU it is at most 0.94 % in float16; bfloat16 has 3 bits less."""
QUANTIZED_LIMIT = 0.15
"""Maximum error of the median position with quantized weights. On a CPU it is at most 8 %."""
MODEL_S = 900.0
PHASES = ("prompt", "chunk", "decode")
STEP_SECTIONS = ("device_config.", "quant_config.", "model_config.model_dtype", "model_config.implementation")
"""Settings of a server that change what a step computes."""


def examine(names: Sequence[str], settings: Sequence[str], logs: Path, command: Sequence[str] | None = None) -> Outcome:
    """Run this file for each model and judge its output.

    Args:
        names: Names of models; empty: all models.
        settings: Settings of the server as "section.key=value"; those of `STEP_SECTIONS` apply.
        logs: Folder for the output of each process.
        command: Command to run in place of this file.
    """
    from families import models

    own = [text for each in settings if each.startswith(STEP_SECTIONS) for text in ("--set", each)]
    results: list[dict[str, object]] = []
    faults = []
    for name in names or models.names():
        log = logs / f"precision-{name}.log"
        result, fault = _run([*(command or [sys.executable, "-m", "acceptance.device.precision"]), name, *own], log)
        if result is not None:
            results.append(result)
        if fault:
            faults.append(f"{name}: {fault}; {log} has its output")
    return judge(results, faults)


def _run(command: Sequence[str], log: Path) -> tuple[dict[str, object] | None, str]:
    """Return the result that a process printed, and why it failed."""
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=MODEL_S, check=False
            )
        except subprocess.TimeoutExpired:
            return None, f"took longer than {MODEL_S:.0f} s"
    written = log.read_text(errors="replace")
    lines = [line for line in written.splitlines() if line.startswith('{"name"')]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]), ""
    code = done.returncode
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return None, f"ended with {ended}: {reason(written)}"


def judge(results: Sequence[dict[str, object]], ending: Sequence[str] = ()) -> Outcome:
    """Return the outcome.

    Args:
        results: Name of each model with `refused`, or with its `limit` and an error for each of `PHASES`.
        ending: Faults of processes.
    """
    faults = list(ending)
    rows: list[tuple[object, ...]] = []
    for each in results:
        if "refused" in each:
            rows.append((each["name"], each["refused"]))
            continue
        errors = [float(str(each[phase])) for phase in PHASES]
        limit = float(str(each["limit"]))
        rows.append((each["name"], each["context"], *(f"{error:.2%}" for error in errors)))
        faults += [
            f"{each['name']}: an error of {error:.2%} of the largest logit in {phase} steps; {limit:.1%} are allowed"
            for phase, error in zip(PHASES, errors, strict=True)
            if not error <= limit  # also true for NaN
        ]
    if not any("limit" in each for each in results):
        faults.append("no model was computed")
    lines = ["Largest error as a share of the largest logit, by kind of step:", ""]
    return Outcome(TITLE, lines + table(("model", "context", *PHASES), rows), faults)


def measure(name: str, settings: Sequence[str]) -> dict[str, object]:
    """Compute one model as a WorkAgent does and compare it with NumPy."""
    from llm_serving.core.process import set_mindspore_environment

    set_mindspore_environment()
    from acceptance.device import small_models
    from families import models
    from llm_serving.config import load_config
    from llm_serving.errors import ConfigError, KernelError, ModelError
    from llm_serving.executor.supervisor import load_settings

    length = models.model(name).served_length
    served = [] if length is None else [f"model_config.max_generate_length={length}"]
    sizes = [f"pa_config.num_blocks={small_models.NUM_BLOCKS}", f"pa_config.block_size={small_models.BLOCK_SIZE}"]
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        try:
            small_models.write(name, folder)
            config = load_config(None, [*served, *sizes, "model_config.decode_batch_size=4", *settings], folder)
        except (ConfigError, ModelError) as refusal:
            return {"name": name, "refused": str(refusal).removeprefix("--set: ").removeprefix("--model: ")}
        from llm_serving.worker.loading import load_runner

        try:
            runner, _ = load_runner(load_settings(config, 0), lambda text: None)
        except KernelError as error:
            raise SystemExit(f"KernelError: {error}") from None
        runner.warm_up()
        context = config.model.max_generate_length
        quantized = config.quant.quantization is not None
        errors = small_models.errors(name, folder, context, runner, quantized)
        limit = QUANTIZED_LIMIT if quantized else LIMITS[config.model.model_dtype]
    return {"name": name, "context": context, "limit": limit, **dict(zip(PHASES, errors, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="of the model")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    sys.stdout.write("\n" + json.dumps(measure(arguments.name, arguments.set)) + "\n")


if __name__ == "__main__":
    main()
