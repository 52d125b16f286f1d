"""The processes that compute a replica together, as each of them knows them.

Programs of a CPU add up in memory that the ranks share (`kernels.ranks`). Graphs have collectives of MindSpore, whose
processes find each other by a *scheduler*, one process more ("Dynamic Cluster" in MindSpore's documentation): rank 0
starts it at a port of this machine that all were given. It computes nothing and ends with rank 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Final, Protocol

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import init

from llm_serving.core.enums import describe_exit
from llm_serving.core.process import command_of, die_with_parent
from llm_serving.log import get_logger

logger = get_logger(__name__)

HOST: Final = "127.0.0.1"
"""Of scheduler and ranks: nobody reaches them from another machine."""
FORM_S: Final = 600
"""Seconds until all must be there. The master ends those that wait for nobody."""
ASK_S: Final = 1
"""Between two questions whether all are there, and later signs of life. It would be 3 to 5, for clusters of many."""
RECEIVE_S: Final = 24 * 3600
"""Seconds that MCCL waits for another rank: `serving_config.step_timeout_s` decides when one is given up."""


class RankGroup(Protocol):
    """Those with whom a process computes."""

    def begin(self, step: int, timeout_s: float) -> None:
        """What comes next belongs to a step, as it must for all; another is waited for so many seconds."""

    def check(self) -> None:
        """Raises:
        RankLostError: Another rank is gone, or does something else.
        """

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank gives, in their order; all give as many numbers below 2^31."""


class CollectiveGroup:
    """Ranks whose graphs have collectives; one for each process, before its first tensor.

    A collective of which a rank is missing does not end. The master ends all ranks when one has ended, or when a step
    takes longer than `serving_config.step_timeout_s`, so nothing is looked after here.
    """

    def __init__(self, rank: int, count: int, port: int, device_target: str) -> None:
        """Waits until the others have come.

        Args:
            rank: From 0 on.
            count: Of ranks.
            port: Of this machine, for the scheduler.
            device_target: Ascend or CPU.
        """
        os.environ.update(
            MS_ROLE="MS_WORKER",
            MS_NODE_ID=str(rank),
            MS_WORKER_NUM=str(count),
            MS_WORKER_IP=HOST,
            MS_SCHED_HOST=HOST,
            MS_SCHED_PORT=str(port),
            MS_TOPO_TIMEOUT=str(FORM_S),
            MS_RECEIVE_MSG_TIMEOUT=str(RECEIVE_S),
            MS_RETRY_INTERVAL_LOWER=str(ASK_S),
            MS_RETRY_INTERVAL_UPPER=str(ASK_S),
        )
        if rank == 0:
            _start_scheduler(port)
        init("hccl" if device_target == "Ascend" else "mccl")

    def begin(self, step: int, timeout_s: float) -> None:
        """All ranks get all steps, in one order."""

    def check(self) -> None:
        """Whoever can ask has not lost another."""

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        gathered = _Gather()(ms.Tensor(np.array([numbers], np.int32))).asnumpy()
        return gathered.tolist()  # type: ignore[no-any-return]


class _Gather(nn.Cell):
    """[1, N] of each rank -> [ranks, N]"""

    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.AllGather()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.gather(x)


def _start_scheduler(port: int) -> None:
    """In the environment of rank 0. Without it the ranks would wait in vain, so this process ends with it."""
    environment = {**os.environ, "MS_ROLE": "MS_SCHED"}
    command = command_of(__name__, str(os.getpid()))
    scheduler = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603

    def watch() -> None:
        code = scheduler.wait()
        logger.error("the scheduler of the ranks at port %d ended: %s", port, describe_exit(code))
        os._exit(1)

    threading.Thread(target=watch, name="scheduler", daemon=True).start()


def _schedule(parent: int) -> None:
    """Helps the ranks to find each other, until its parent ends."""
    die_with_parent()
    if os.getppid() == parent:
        ms.set_device("CPU")
        init()  # returns when all have left


if __name__ == "__main__":
    _schedule(int(sys.argv[1]))
