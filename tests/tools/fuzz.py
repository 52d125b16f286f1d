"""Fuzz the readers of untrusted bytes, and print the first input that fails in an unexpected way.

    pip install atheris==3.0.0
    python tests/tools/fuzz.py requests --minutes 60       # guided by coverage if atheris is installed
    python tests/tools/fuzz.py all --minutes 1 --blind     # random inputs

Targets: connections, frames, requests, safetensors, yaml, all (one after the other). The exit code is 1 if an input
failed; the input is written to fuzz-TARGET.bin. An input may take `MOST_SECONDS` of CPU time.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

MOST_SECONDS = 10
HANGING_S = 1200
"""Seconds of wall-clock time after which an input counts as endless; it is high because the process may be stopped."""


def read_in_time(read: Callable[[bytes], None], data: bytes) -> None:
    """Raise `AssertionError` if reading takes too much CPU time."""
    began = time.process_time()
    read(data)
    took = time.process_time() - began
    assert took < MOST_SECONDS, f"took {took:.0f} s"


def blindly(name: str, seconds: float, seed: int) -> int:
    """Read random changes of the corpus."""
    from tools.fuzzing import TARGETS, mutated

    target, rng = TARGETS[name], random.Random(seed)
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        data = mutated(rng, target.corpus)
        count += 1
        try:
            read_in_time(target.read, data)
        except Exception as error:  # noqa: BLE001  every exception is a finding
            kept = Path(f"fuzz-{name}.bin")
            kept.write_bytes(data)
            sys.stdout.write(f"{name}: {type(error).__name__}: {error} after {count:,} inputs; written to {kept}\n")
            return 1
    sys.stdout.write(f"{name}: {count:,} random inputs in {time.monotonic() - began:.0f} s, nothing found\n")
    return 0


def guided(name: str, seconds: float, seed: int) -> int:
    """Run atheris in a process of its own, which atheris ends."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            name,
            "--run_atheris",
            folder,
            f"-seed={seed}",
            f"-max_total_time={int(seconds)}",
        ]
        options = [
            f"-timeout={HANGING_S}",
            "-max_len=20000",
            "-print_final_stats=1",
            f"-exact_artifact_path=fuzz-{name}.bin",
        ]
        finished = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    lines = finished.stderr.splitlines()
    stats = "; ".join(line.removeprefix("stat::") for line in lines if line.startswith("stat::"))
    if finished.returncode == 0:
        sys.stdout.write(f"{name}: guided by coverage for {seconds:.0f} s, nothing found; {' '.join(stats.split())}\n")
        return 0
    sys.stdout.write(f"{name}: FOUND a failure\n" + "\n".join(lines[-60:]) + "\n")
    return 1


def run_atheris(name: str, folder: str, options: list[str]) -> None:
    """Run atheris; the code of the process that `guided` starts."""
    import atheris  # type: ignore[import-not-found, unused-ignore]

    with atheris.instrument_imports(include=["llm_serving", "yaml"]):
        from tools.fuzzing import TARGETS
    target = TARGETS[name]
    for index, data in enumerate(target.corpus):
        (Path(folder) / str(index)).write_bytes(data)
    atheris.Setup([sys.argv[0], *options, folder], functools.partial(read_in_time, target.read))
    atheris.Fuzz()


def main() -> int:
    names = ("connections", "frames", "requests", "safetensors", "yaml")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=(*names, "all"))
    parser.add_argument("--minutes", type=float, default=1.0, help="duration for each target (default: 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blind", action="store_true", help="random inputs even if atheris is installed")
    parser.add_argument("--run_atheris", help=argparse.SUPPRESS)
    args, options = parser.parse_known_args()
    logging.disable(logging.CRITICAL)
    if args.run_atheris:
        run_atheris(args.target, args.run_atheris, options)
        return 0
    if options:
        parser.error(f"unknown arguments: {' '.join(options)}")
    run = blindly if args.blind or importlib.util.find_spec("atheris") is None else guided
    chosen = names if args.target == "all" else (args.target,)
    return max([run(name, 60 * args.minutes, args.seed) for name in chosen])


if __name__ == "__main__":
    sys.exit(main())
