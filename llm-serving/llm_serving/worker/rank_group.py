"""The group of ranks that compute a replica together.

If one CPU operator computes the whole network (`lowering.program`), the ranks add partial sums in shared memory
(`kernels.ranks`). Other networks use MindSpore's collectives. The processes of such ranks find each other through
MindSpore's *scheduler* process ("Dynamic Cluster" in its documentation), which rank 0 starts, and which computes
nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import init

from llm_serving.core.enums import describe_exit
from llm_serving.core.process import command_of, die_with_parent
from llm_serving.kernels.ranks import Ranks
from llm_serving.log import get_logger

logger = get_logger(__name__)

HOST: Final = "127.0.0.1"
"""Address of the ranks and of MindSpore's scheduler process. Other machines cannot reach it."""
JOIN_TIMEOUT_S: Final = 600
POLL_INTERVAL_S: Final = 1
"""Seconds between two polls of MindSpore's scheduler process. MindSpore's default of 3 to 5 s is for large clusters."""
RECEIVE_TIMEOUT_S: Final = 24 * 3600
"""Seconds that MCCL waits for another rank. The shorter `serving_config.step_timeout_s` takes effect first."""


class CollectiveGroup:
    """Ranks whose graphs use collectives. Create it once for each process, before the first tensor. A collective never
    ends if a rank is missing. So the master terminates all ranks when one exits or a step exceeds
    `serving_config.step_timeout_s`.
    """

    def __init__(self, rank: int, count: int, port: int, device_target: str, rank_table: Path | None = None) -> None:
        """Wait until all ranks have joined. `port`: port of MindSpore's scheduler. `rank_table`: file for HCCL."""
        if rank_table is not None:
            os.environ["RANK_TABLE_FILE"] = str(rank_table)
        os.environ.update(
            MS_ROLE="MS_WORKER",
            MS_NODE_ID=str(rank),
            MS_WORKER_NUM=str(count),
            MS_WORKER_IP=HOST,
            MS_SCHED_HOST=HOST,
            MS_SCHED_PORT=str(port),
            MS_TOPO_TIMEOUT=str(JOIN_TIMEOUT_S),
            MS_RECEIVE_MSG_TIMEOUT=str(RECEIVE_TIMEOUT_S),
            MS_RETRY_INTERVAL_LOWER=str(POLL_INTERVAL_S),
            MS_RETRY_INTERVAL_UPPER=str(POLL_INTERVAL_S),
        )
        if rank == 0:
            _start_scheduler(port)
        init("hccl" if device_target == "Ascend" else "mccl")

    def start_step(self, step: int, timeout_s: float) -> None: ...

    def check(self) -> None: ...

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Do what `Ranks.exchange` does, for integers below 2^31."""
        gathered = _Gather()(ms.Tensor(np.array([numbers], np.int32))).asnumpy()
        return gathered.tolist()  # type: ignore[no-any-return]


RankGroup = Ranks | CollectiveGroup


class _Gather(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.AllGather()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.gather(x)


def _start_scheduler(port: int) -> None:
    """Start MindSpore's scheduler process. If it exits, exit this rank too, because the ranks would wait forever."""
    environment = {**os.environ, "MS_ROLE": "MS_SCHED"}
    command = command_of(__name__, str(os.getpid()))
    scheduler = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603

    def watch() -> None:
        code = scheduler.wait()
        logger.error(
            "MindSpore's scheduler process (port %d) exited, so rank 0 exits too: %s", port, describe_exit(code)
        )
        os._exit(1)

    threading.Thread(target=watch, name="scheduler", daemon=True).start()


def _schedule(parent: int) -> None:
    die_with_parent()
    if os.getppid() == parent:
        ms.set_device("CPU")
        init()  # returns when all ranks have exited


if __name__ == "__main__":
    _schedule(int(sys.argv[1]))
