"""The processes that compute one replica: python performance/rank_memory.py --model FOLDER [--limit-mb 2200] [--speed]

Starts the WorkAgents of one replica, as one process and as two, has them answer, and says what each process holds: its
own memory (RssAnon), and what counts against a limit (VmData: that, and what was asked for and never touched). With
--limit-mb the system gives no process more than that (RLIMIT_DATA). With --speed they share the cores instead, two in
all, and the second of two runs of each load says how fast they are. Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llm_serving.config import load_config
from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput, join_pieces
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.engine import Engine
from llm_serving.engine.replica import build_engine
from llm_serving.errors import LLMServingError
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.executor.supervisor import WorkAgentProcess, start_work_agent
from llm_serving.executor.tensor_parallel import RankProcesses
from llm_serving.observability.metrics import Metrics
from llm_serving.text.tokenizer.tokenizer import Tokenizer

PROMPT = list(range(5, 37))
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SHOWN = ("RssAnon", "VmData")
NUM_CORES = 2
LOADS = (("one stream", 1, 32, 32), ("32 requests", 32, 32, 32), ("prompt of 1,024", 1, 1024, 1))
"""Name, requests, tokens of a prompt, tokens of an answer."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.limit_mb is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (arguments.limit_mb * 2**20, hard))
        print(f"no process gets more than {arguments.limit_mb} MB")
    for count in (1, 2):
        print(f"tensor_parallel: {count}")
        try:
            _load(arguments.model, count, arguments.speed)
        except LLMServingError as error:
            print(f"    {type(error).__name__}: {str(error)[:300]}")
    return 0


def _load(model: Path, count: int, is_timed: bool) -> None:
    settings = [
        f"cluster_config.tensor_parallel={count}",
        f"pa_config.num_blocks={512 if is_timed else 64}",
        f"device_config.num_threads={NUM_CORES // count if is_timed else 1}",
    ]
    config = load_config(None, [*settings, "serving_config.log_level=ERROR"], model)
    agent = start_work_agent(config, 0, lambda text: None)
    try:
        pieces: list[RequestOutput] = []
        engine = build_engine(
            config,
            agent.loaded.num_blocks,
            RemoteExecutor(agent.channel, agent.buffers, config.serving.step_timeout_s),
            Tokenizer.load(model),
            Metrics(),
            pieces.extend,
        )
        engine.submit(Request("one", PROMPT, GREEDY))
        while engine.step():
            pass
        for rank, pid in enumerate(_pids(agent)):
            print(f"    rank {rank}: " + ", ".join(f"{name} {_megabytes(pid, name):,.0f} MB" for name in SHOWN))
        print(f"    answered {list(join_pieces(pieces).token_ids)}", flush=True)
        if is_timed:
            for name, requests, length, tokens in LOADS:
                seconds = [_seconds(engine, f"{name} {run}", requests, length, tokens) for run in range(2)]
                computed = requests * (tokens if tokens > 1 else length)
                print(f"    {name}: {computed / seconds[-1]:,.1f} tokens/s", flush=True)
    finally:
        agent.kill()


def _seconds(engine: Engine, name: str, requests: int, length: int, tokens: int) -> float:
    """Until so many prompts of a length, none of which begins as another, have so many tokens each."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for number in range(requests):
        prompt = np.random.default_rng([zlib.crc32(name.encode()), number]).integers(5, 2000, length).tolist()
        engine.submit(Request(f"{name}, {number}", prompt, params))
    began = time.perf_counter()
    while engine.step():
        pass
    return time.perf_counter() - began


def _pids(agent: WorkAgentProcess) -> list[int]:
    processes = agent.process.ranks if isinstance(agent.process, RankProcesses) else [agent.process]
    return [process.pid for process in processes if process.pid is not None]


def _megabytes(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--limit-mb", type=int)
    parser.add_argument("--speed", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
