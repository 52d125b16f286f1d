"""Kill WorkAgents at each moment of each kind of stream, and compare the streams with the reference answers.

    python tests/tools/kill_matrix.py                 # all parts: some minutes
    python tests/tools/kill_matrix.py --only model    # one of: simulated, model, ranks, server

    simulated   the engine over a fake model, each of its steps lost once, under three policies, by recompute and swap
    model       the engine over a real WorkAgent process with the shipped model, killed or stopped by a signal
    ranks       as model, over two processes that compute together, which are killed in turn
    server      the real server, streams read over HTTP, one or two WorkAgents; the master killed and stopped

The reference answers are computed one at a time (batch size 1). Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from llm_serving.core.step import StepInput
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.tensor_parallel import RankProcesses
from support.agent_forks import end_forks
from support.engine_harness import bytes_of
from support.fake_speculation import RandomDrafts
from support.fragile_harness import FragileHarness
from support.kills import MOMENTS, Table, compare, play, streams
from support.real_replica import RealReplica
from support.server_process import shared_memory_names, unwind_on_sigterm
from tools.killed_servers import a_server, end_of_a_master, table_of_one, table_of_two

NEVER = range(0)
MANY = 2000
"""Higher than the number of replies of any run."""
DISTANCE = 17
"""Replies from one kill to the next; runs differ in the offset of the first kill."""


# --- the engine over a fake model -------------------------------------------------------------------------------------


def simulated_table(offsets: range = range(DISTANCE)) -> Table:
    """Kill a fake WorkAgent in every `DISTANCE`-th step from each offset on; all offsets together cover each step."""
    table = Table("every step, simulated model", list(MOMENTS))
    reference = {
        name: [_reference_answer(index, name) for index in range(len(requests))]
        for name, requests in streams(8).items()
    }
    settings = product(("prefill_first", "decode_first", "mixed"), ("recompute", "swap"), offsets)
    for policy, mode, offset in settings:
        drafts = RandomDrafts(random.Random(offset)) if offset % 2 else None
        harness = FragileHarness(
            drafter=drafts,
            policy=policy,
            num_blocks=16,
            num_swap_blocks=24,
            preemption_mode=mode,
            prefix_caching=True,
            max_num_batched_tokens=16,
            max_long_prefill_tokens=12,
        )

        def kill(harness: FragileHarness = harness) -> None:
            def die(step: StepInput) -> None:
                harness.executor.spoil = lambda step: None
                raise WorkerDiedError("killed")

            table.num_kills += 1
            harness.executor.spoil = die

        asked = streams(8)
        met = play(harness.engine, asked, kill, range(offset, MANY, DISTANCE))
        compare(table, asked, met, reference, harness.answer)
        harness.scheduler.check_integrity()
        assert harness.scheduler.blocks.pool.num_used_blocks == 0
        table.num_restarts += harness.executor.num_restarts
    return table


def _reference_answer(index: int, name: str) -> str:
    harness = FragileHarness()
    request = streams(8)[name][index]
    request.fork_of = None
    harness.submit(request)
    harness.run()
    return bytes_of(harness.answer(request.request_id))


# --- the engine over a real WorkAgent ---------------------------------------------------------------------------------

SETTINGS = (
    "pa_config.num_blocks=20",
    "pa_config.num_swap_blocks=24",
    "scheduler_config.preemption_mode=swap",
    "scheduler_config.max_prefill_tokens=16",
    "scheduler_config.max_long_prefill_tokens=12",
    "model_config.decode_batch_size=8",
    "serving_config.log_level=ERROR",
)
HANGS = "serving_config.step_timeout_s=1.0"
"""A short timeout notices a hanging WorkAgent soon; on a busy machine it may restart a slow one as well."""
NUM_TOKENS = 24
SIGNALS = {signal.SIGKILL: range(0, DISTANCE, 5), signal.SIGSTOP: range(2, DISTANCE, 9)}
"""The offsets with which each signal is sent; they are few, because a WorkAgent takes seconds to start."""
RANK_SIGNALS = {signal.SIGKILL: range(0, DISTANCE, 9), signal.SIGSTOP: range(3, DISTANCE, DISTANCE)}


def model_tables(
    signals: dict[signal.Signals, range] = SIGNALS, most_kills: int = MANY, num_ranks: int = 1
) -> Iterator[Table]:
    """Yield a table for each signal, which is sent at most `most_kills` times from each offset on."""
    hangs = (HANGS,) if signal.SIGSTOP in signals else ()
    replica = RealReplica(*SETTINGS, *hangs, f"cluster_config.tensor_parallel={num_ranks}")
    try:
        reference: dict[str, list[str]] = {}
        for name, requests in streams(NUM_TOKENS).items():
            reference[name] = []
            for request in requests:
                request.fork_of = None
                play(replica.engine, {name: [request]}, lambda: None, NEVER)
                reference[name].append(bytes_of(replica.take_answer(request.request_id)))
        yield from (_model_table(replica, reference, sent, offsets, most_kills) for sent, offsets in signals.items())
    finally:
        replica.close()


def _model_table(
    replica: RealReplica, reference: dict[str, list[str]], sent: signal.Signals, offsets: range, most_kills: int
) -> Table:
    num_ranks = len(_processes(replica))
    title = "real WorkAgent process" if num_ranks == 1 else f"{num_ranks} real WorkAgent processes, killed in turn"
    table = Table(f"{title}, {sent.name}", ["idle", *MOMENTS])
    num_restarts = replica.num_restarts

    def send() -> None:
        # If the reply has been sent already, the first lost step is the one after it, which is in flight.
        os.kill(_processes(replica)[table.num_kills % num_ranks], sent)
        table.num_kills += 1

    def run_without_kills() -> None:
        asked = streams(NUM_TOKENS)
        play(replica.engine, asked, lambda: None, NEVER)
        idle = {request.request_id: {"idle"} for requests in asked.values() for request in requests}
        compare(table, asked, idle, reference, replica.take_answer)

    send()
    run_without_kills()
    for offset in offsets:
        asked = streams(NUM_TOKENS)
        met = play(replica.engine, asked, send, range(offset, MANY, DISTANCE)[:most_kills])
        compare(table, asked, met, reference, replica.take_answer)
        assert replica.engine.scheduler.blocks.pool.num_used_blocks == 0
    run_without_kills()  # the WorkAgent may have died after its last reply
    table.num_restarts = replica.num_restarts - num_restarts
    return table


def _processes(replica: RealReplica) -> list[int]:
    """Return the process ids of the ranks, in order of rank."""
    process = replica.agents[-1].process
    return [each.pid for each in process.ranks] if isinstance(process, RankProcesses) else [process.pid]


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("simulated", "model", "ranks", "server"))
    only = parser.parse_args().only
    unwind_on_sigterm()
    names, myself = shared_memory_names(), psutil.Process()
    logging.disable(logging.CRITICAL)
    good = True

    def show(table: Table) -> None:
        nonlocal good
        good &= table.all_equal
        sys.stdout.write(f"{table}\n")
        sys.stdout.flush()

    if only in (None, "simulated"):
        show(simulated_table())
    if only in (None, "model"):
        for table in model_tables():
            show(table)
    if only in (None, "ranks"):
        for table in model_tables(RANK_SIGNALS, num_ranks=2):
            show(table)
    if only in (None, "server"):
        show(table_of_one())
        for sent in (signal.SIGKILL, signal.SIGTERM):
            with a_server(num_agents=2) as server:
                if sent == signal.SIGKILL:
                    show(table_of_two(server))
                sys.stdout.write(f"{end_of_a_master(server, sent)}\n")
    end_forks()
    left = [process.pid for process in myself.children(recursive=True)]
    new = sorted(shared_memory_names() - names)
    sys.stdout.write(f"processes left: {left or 'none'}; new in /dev/shm: {new or 'none'}\n")
    return 0 if good and not left and not new else 1


if __name__ == "__main__":
    sys.exit(main())
