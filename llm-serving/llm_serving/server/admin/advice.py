"""GET /v1/scheduler/advice: how the recent requests would have run with other configuration values."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from msgspec import Struct
from msgspec.json import encode
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.admission.admission_control import RefusedRequests
from llm_serving.config.report import describe
from llm_serving.config.schema import ServingConfig
from llm_serving.core.process import command_of
from llm_serving.core.timings import Clock
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import CapacityError, RequestError, UnavailableError
from llm_serving.log import get_logger
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.generation.generation import run_until_client_leaves
from llm_serving.server.middleware.authentication import check_operator
from llm_serving.server.parsing.headers import query_integer
from llm_serving.server.parsing.offload import json_response

logger = get_logger(__name__)

SIMULATOR: Final = "llm_serving_simulator"
COMMAND: Final = tuple(command_of(f"{SIMULATOR}.advice"))
BUDGET_S: Final = 120.0
"""Maximum seconds of computation of the simulator process, which has the lowest priority."""
TIMEOUT_S: Final = 240.0
RETRY_AFTER_S: Final = 30.0
MAX_OUTPUT_CHARS: Final = 300

MINUTES: Final = 5
MAX_MINUTES: Final = 60

ENDPOINTS: Final = Endpoints()


@dataclass(eq=False)
class Advisor:
    """Runs one simulator process at a time for all waiting clients. Only the event loop may use it."""

    config: Callable[[], ServingConfig]
    clock: Clock
    command: Sequence[str] = COMMAND
    """Command of the simulator process, which reads a request from its input and writes advice to its output."""
    refused: Callable[[float], Sequence[RefusedRequests]] = lambda since: ()
    """Returns the requests refused since a time on `clock`."""
    _minutes: int = 0
    _task: asyncio.Task[dict[str, Any]] | None = None
    _num_waiting: int = 0
    """Number of clients that wait for `_task`. At 0, `_task` has ended or is being cancelled."""

    async def advise(self, minutes: int) -> dict[str, Any]:
        """Return advice on the last `minutes`. If the last waiting client disconnects, the simulation is cancelled."""
        if find_spec(SIMULATOR) is None:
            raise UnavailableError(f"advice needs the package {SIMULATOR}, which is not installed on this server")
        folder = self.config().scheduler.record_path
        if folder is None:
            rule = "must name a folder, so that the server records the inputs and decisions of its schedulers"
            raise RequestError("record_path", f"{rule} (scheduler_config.record_path; a change requires a restart)")
        while self._task is not None and self._num_waiting == 0 and not self._task.done():
            await asyncio.wait([self._task])
        if self._task is not None and not self._task.done():
            if minutes != self._minutes:
                raise CapacityError("advice on a different period is being computed", RETRY_AFTER_S)
        else:
            self._minutes = minutes
            self._task = asyncio.create_task(self._simulate(str(folder), minutes))
        task = self._task
        self._num_waiting += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                task.cancel()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _simulate(self, folder: str, minutes: int) -> dict[str, Any]:
        config = self.config()
        since = self.clock() - 60.0 * minutes
        question = {
            "yaml": describe(config),
            "sources": dict(config.sources),
            "folder": folder,
            "since": since,
            "refused": self.refused(since),
            "budget_s": BUDGET_S,
        }
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a process group of its own, so that all its processes can be killed
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                written, errors = await process.communicate(encode(question))
        except TimeoutError:
            rule = "the simulator gets only the processor time that the server does not use"
            raise UnavailableError(f"advice was not ready within {TIMEOUT_S:g} s: {rule}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole process group has ended
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        try:
            advice = json.loads(written)
        except ValueError:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            logger.error(
                "the simulator process for advice failed: exit_code=%d last_line=%s",
                process.returncode,
                last[:MAX_OUTPUT_CHARS],
            )
            raise UnavailableError("the simulation exceeded its time or memory limit") from None
        if "error" in advice:
            rule = f"must cover enough recorded requests; there is no advice on {minutes}"
            raise RequestError("minutes", f"{rule}: {advice['error']}")
        return dict(advice)


class AdviceView(Struct):
    """The JSON form of `llm_serving_simulator.advice.Advice`."""

    requests: int
    refused: int
    seconds: float
    step_error: float
    played: int
    not_played: int
    advised: list[dict[str, Any]]
    otherwise: list[dict[str, Any]]


@ENDPOINTS.add(
    "GET",
    "/v1/scheduler/advice",
    "Suggest better values of configuration keys",
    answer=AdviceView,
    query={"minutes": {"type": "integer", "minimum": 1, "maximum": MAX_MINUTES}},
)
async def show_advice(engine: AsyncEngine, http_request: Request) -> Response:
    check_operator(http_request)
    work = http_request.app.advisor.advise(query_integer(http_request, "minutes", MINUTES, MAX_MINUTES))
    return json_response(await run_until_client_leaves(http_request.receive, work))
