"""Compare logits of small models of every family with the committed golden ones, by the graph of primitives in float16.

    PYTHONPATH=tests python -m acceptance.device.precision --device ascend [NAME ...]

Prints one line of JSON for each model. It runs in a process of its own, because a failing device crashes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from acceptance.device.outcome import Outcome, reason, table

TITLE = "Precision"
GATE = 0.005
"""Maximum error relative to the largest logit: the limit of the contest."""
TIMEOUT_S = 3600.0


def examine(device: str, names: Sequence[str], command: Sequence[str] | None = None) -> Outcome:
    """Run this file and judge its output.

    Args:
        device: cpu or ascend.
        names: Names of models; empty: all models.
        command: Command to run in place of this file.
    """
    command = command or [sys.executable, "-m", "acceptance.device.precision", "--device", device, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Outcome.failed(TITLE, f"the models took longer than {TIMEOUT_S:.0f} s")
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ending = [] if done.returncode == 0 else [f"ended with {done.returncode}: {reason(done.stderr)}"]
    return judge(results, ending)


def judge(results: Sequence[dict[str, object]], ending: Sequence[str] = ()) -> Outcome:
    """Return the outcome.

    Args:
        results: Name of each model with `refused`, or with its `error` and greedy tokens: `equal` of `of`.
        ending: Errors of the process itself.
    """
    faults = list(ending)
    rows: list[tuple[object, ...]] = []
    for each in results:
        if "refused" in each:
            rows.append((each["name"], each["refused"], ""))
            continue
        error = each["error"]
        assert isinstance(error, float)
        rows.append((each["name"], f"{error:.2%}", f"{each['equal']} of {each['of']}"))
        if not error <= GATE:  # also true for NaN
            faults.append(f"{each['name']}: an error of {error:.2%} of the largest logit; {GATE:.1%} are allowed")
    if not any("error" in each for each in results):
        faults.append("no model was computed")
    lines = ["Largest error as a share of the largest logit, and greedy tokens up to the first that differs:", ""]
    return Outcome(TITLE, lines + table(("model", "error", "tokens"), rows), faults)


def measure(device: str, name: str) -> dict[str, object]:
    """One model on the device."""
    from llm_serving.core.process import set_mindspore_environment

    set_mindspore_environment()
    import numpy as np
    from families import models
    from families.precision import greedy
    from llm_serving.config.sections.device import DeviceConfig
    from llm_serving.errors import ModelError
    from llm_serving.models.spec import ModelSpec
    from llm_serving.worker.device import backend_for, configure_device
    from support.graph_model import BLOCK_SIZE, GraphModel

    target = DeviceConfig(device_target="Ascend" if device == "ascend" else "CPU", kernels="primitives")
    configure_device(target)
    golden = models.golden(name)
    longest = golden.served_length or max(golden.prompts) + models.NEW_TOKENS
    error, equal, of = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        models.write(name, Path(folder))
        spec = dataclasses.replace(ModelSpec.from_folder(Path(folder)), max_position_embeddings=longest)
        backend, _ = backend_for(target, "float16")
        try:
            model = GraphModel(spec, Path(folder), backend, num_blocks=-(-longest // BLOCK_SIZE), as_program=False)
        except ModelError as refusal:
            return {"name": name, "refused": str(refusal)}
        for prompt in golden.prompts.values():
            logits, tokens = greedy(model, prompt, longest)
            off = np.abs(logits[prompt.positions] - prompt.logits).max() / np.abs(prompt.logits).max()
            error = max(error, float(off)) if off == off else float("nan")
            pairs = list(zip(tokens, prompt.generated.tolist(), strict=False))
            equal += next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
            of += len(pairs)
    return {"name": name, "error": error, "equal": equal, "of": of}


def main() -> None:
    from families import models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; default: all")
    parser.add_argument("--device", required=True, choices=("cpu", "ascend"))
    arguments = parser.parse_args()
    for name in arguments.names or models.names():
        sys.stdout.write(json.dumps(measure(arguments.device, name)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
