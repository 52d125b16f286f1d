"""Kill, stop and starve the two ranks of a replica in each of its configurations; compare all answers.

    python tests/tools/rank_attacks.py                # some minutes
    python tests/tools/rank_attacks.py --only int8    # only settings whose names match

Two ranks of real WorkAgents get streams of every kind (`kills.streams`) at once, and their KV caches are too small for
all of them. Then they get the same streams again while the ranks are killed, stopped, or without shared memory. The
reference answers are those of two ranks with the same settings, one request at a time and without speculation. Prints a
table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from llm_serving.errors import ConfigError
from llm_serving.executor.tensor_parallel import RankProcesses
from support.engine_harness import bytes_of
from support.kills import play, streams
from support.real_replica import RealReplica

SETTINGS: Final = (
    "cluster_config.tensor_parallel=2",
    "pa_config.num_blocks=20",
    "pa_config.num_swap_blocks=24",
    "scheduler_config.max_prefill_tokens=16",
    "scheduler_config.max_long_prefill_tokens=12",
    "model_config.decode_batch_size=8",
    "serving_config.log_level=ERROR",
)
NUM_TOKENS: Final = 24
NEVER: Final = range(0)
STOPPED_S: Final = 30.0
CONFIGURATIONS: Final = {
    "as it is": (),
    "preempted by swap": ("scheduler_config.preemption_mode=swap",),
    "n-gram speculation": ("scheduler_config.speculative_method=ngram",),
    "graphs and collectives": ("device_config.kernels=primitives",),
    "a draft model": ("scheduler_config.speculative_method=draft_model", "scheduler_config.draft_model_path=demo"),
    "w8a8": ("quant_config.quantization=w8a8",),
    "w8a16": ("quant_config.quantization=w8a16",),
    "w4a16": ("quant_config.quantization=w4a16",),
    "w4a8": ("quant_config.quantization=w4a8",),
    "int8 cache": ("quant_config.kv_cache_dtype=int8",),
    "w8a8, int8 cache and speculation": (
        "quant_config.quantization=w8a8",
        "quant_config.kv_cache_dtype=int8",
        "scheduler_config.speculative_method=ngram",
    ),
}
"""Settings by name of a configuration."""


@dataclass
class Attack:
    """Something that is done to the ranks while a step is computed, after each reply whose number is in `victims`."""

    name: str
    victims: Collection[int]
    strike: Callable[[RealReplica, int], None]
    """Called with the replica and the number of the attack."""
    settings: tuple[str, ...] = ()


def _send(sent: signal.Signals, *ranks: int) -> Callable[[RealReplica, int], None]:
    """Return an attack that sends the signal to these ranks; without ranks, to one rank after the other."""

    def strike(replica: RealReplica, number: int) -> None:
        for rank in ranks or (number % 2,):
            os.kill(_pids(replica)[rank], sent)

    return strike


def _stop_for_a_while(replica: RealReplica, number: int) -> None:
    pid = _pids(replica)[number % 2]
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()


def _fill_and_kill(replica: RealReplica, number: int) -> None:
    """Fill /dev/shm, then kill the ranks, so that the next ones find no space in it."""
    subprocess.run(["dd", "if=/dev/zero", "of=/dev/shm/full", "bs=64k"], capture_output=True, check=False)
    _send(signal.SIGKILL)(replica, number)


ATTACKS: Final = (
    Attack("nothing", NEVER, _send(signal.SIGCONT)),
    Attack("one rank killed, and the other", (9, 40), _send(signal.SIGKILL)),
    Attack("both ranks killed", (20,), _send(signal.SIGKILL, 0, 1)),
    Attack("a rank stopped, noticed after 2 s", (20,), _send(signal.SIGSTOP), ("serving_config.step_timeout_s=2",)),
)
MORE_ATTACKS: Final = (
    Attack("a rank stopped for 30 s, which is waited for", (20,), _stop_for_a_while),
    Attack("/dev/shm full, a rank killed", (20,), _fill_and_kill),
)
"""Further attacks, which are run on one configuration only."""


def reference(settings: tuple[str, ...]) -> dict[str, list[str]]:
    replica = RealReplica(*SETTINGS, *settings)
    answers: dict[str, list[str]] = {}
    try:
        for name, requests in streams(NUM_TOKENS).items():
            answers[name] = []
            for request in requests:
                request.fork_of = None
                play(replica.engine, {name: [request]}, lambda: None, NEVER)
                answers[name].append(bytes_of(replica.take_answer(request.request_id)))
    finally:
        replica.close()
    return answers


def attacked(configuration: str, attack: Attack, expected: dict[str, list[str]]) -> bool:
    """Print the row of an attack; return whether all answers are right."""
    replica = RealReplica(*SETTINGS, *CONFIGURATIONS[configuration], *attack.settings)
    num_strikes = 0

    def strike() -> None:
        nonlocal num_strikes
        attack.strike(replica, num_strikes)
        num_strikes += 1

    try:
        asked = streams(NUM_TOKENS)
        play(replica.engine, asked, strike, attack.victims)
        pairs = [
            (bytes_of(replica.take_answer(request.request_id)), answer)
            for name, requests in asked.items()
            for request, answer in zip(requests, expected[name], strict=True)
        ]
        preempted = sum(request.num_preemptions for requests in asked.values() for request in requests)
        restarts = replica.num_restarts
    finally:
        replica.close()
    num_equal = sum(got == answer for got, answer in pairs)
    sys.stdout.write(f"| {configuration} | {attack.name} | {len(pairs)} | {num_equal} | {preempted} | {restarts} |\n")
    sys.stdout.flush()
    return num_equal == len(pairs)


def _pids(replica: RealReplica) -> list[int]:
    process = replica.agents[-1].process
    assert isinstance(process, RankProcesses)
    return [each.pid for each in process.ranks]


def _with_little_shared_memory() -> None:
    """Run the rest in a mount namespace of its own, whose /dev/shm holds 1 MB."""
    if os.environ.get("SMALL_SHM") != "1":
        mount = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
        os.environ["SMALL_SHM"] = "1"
        os.execvp("unshare", ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, *sys.argv])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="only matching configurations")
    parser.add_argument("--attack", default="", metavar="REGEX", help="only matching attacks")
    args = parser.parse_args()
    if os.geteuid() == 0:
        _with_little_shared_memory()
    columns = ["computed", "attack", "answers", "equal bytes", "preemptions", "started again"]
    sys.stdout.write(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n")
    good = True
    for configuration, settings in CONFIGURATIONS.items():
        if not re.search(args.only, configuration):
            continue
        try:
            expected = reference(tuple(each for each in settings if not each.startswith("scheduler_config")))
            for attack in (*ATTACKS, *(MORE_ATTACKS if configuration == "as it is" else ())):
                if re.search(args.attack, attack.name):
                    good &= attacked(configuration, attack, expected)
        except ConfigError as error:
            sys.stdout.write(f"| {configuration} | refused: {error} | | | | |\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
