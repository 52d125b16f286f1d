"""GET /v1/scheduler/advice: what other values of a key would have made of the last minutes.

The simulator works it out in a process of its own (`Advisor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
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
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.generation.generation import run_until_client_leaves
from llm_serving.server.middleware.authentication import check_operator
from llm_serving.server.parsing.offload import json_response

logger = get_logger(__name__)

SIMULATOR: Final = "llm_serving_simulator"
COMMAND: Final = tuple(command_of(f"{SIMULATOR}.advising"))
BUDGET_S: Final = 120.0
"""Seconds in which neighbours are played: beside a server under load a process of the lowest priority gets little."""
MOST_S: Final = 240.0
"""Seconds after which the process is killed."""
RETRY_AFTER_S: Final = 30.0
MAX_SAID_CHARS: Final = 300
"""Characters of the last output of a failed process that the error repeats."""

MINUTES: Final = 5
MAX_MINUTES: Final = 60


class Advisor:
    """Lives on the event loop; one process at a time, which several may wait for. It ends with the last of them.

    Args:
        config: Asked for the configuration that holds.
        clock: That of recordings.
        command: That reads a question and writes advice.
        refused: Tells who was refused at the door since a time.
    """

    def __init__(
        self,
        config: Callable[[], ServingConfig],
        clock: Clock,
        command: Sequence[str] = COMMAND,
        refused: Callable[[float], Sequence[RefusedRequests]] = lambda since: (),
    ) -> None:
        self._config = config
        self._clock = clock
        self._command = command
        self._refused = refused
        self._minutes = 0
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._num_asking = 0
        """Who wait for that task; none: it has ended, or is about to."""

    async def advise(self, minutes: int) -> dict[str, Any]:
        """Looks at the last minutes. Cancelling it ends the work, unless others wait for the same.

        Raises:
            RequestError: Nothing is recorded, or too little came.
            CapacityError: Advice on another time is being worked out.
            UnavailableError: It took too long, or too much memory, or the package of the simulator is missing.
        """
        if find_spec(SIMULATOR) is None:
            raise UnavailableError(f"advice needs the package {SIMULATOR}, which is not installed on this server")
        folder = self._config().scheduler.record_path
        if folder is None:
            rule = "must name a folder for advice: then the server records what its schedulers are told and decide"
            raise RequestError("record_path", f"{rule} (scheduler_config.record_path; it takes a restart)")
        while self._task is not None and self._num_asking == 0 and not self._task.done():
            await asyncio.wait([self._task])
        if self._task is not None and not self._task.done():
            if minutes != self._minutes:
                raise CapacityError("advice is being worked out already", RETRY_AFTER_S)
        else:
            self._minutes = minutes
            self._task = asyncio.create_task(self._work_out(str(folder), minutes))
        task = self._task
        self._num_asking += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_asking -= 1
            if self._num_asking == 0:
                task.cancel()

    async def close(self) -> None:
        """Ends what is being worked out."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RequestError, UnavailableError):
                await self._task

    async def _work_out(self, folder: str, minutes: int) -> dict[str, Any]:
        config = self._config()
        since = self._clock() - 60.0 * minutes
        question = {
            "yaml": describe(config),
            "sources": dict(config.sources),
            "folder": folder,
            "since": since,
            "refused": self._refused(since),
            "budget_s": BUDGET_S,
        }
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a group of its own, which ends as a whole
        )
        try:
            async with asyncio.timeout(MOST_S):
                written, said = await process.communicate(encode(question))
        except TimeoutError:
            rule = "it only gets the time that others leave"
            raise UnavailableError(f"advice was not worked out within {MOST_S:g} s: {rule}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # nobody of its group is left
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        try:
            told = json.loads(written)
        except ValueError:
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            logger.error("advice: the process ended with code %d: %s", process.returncode, last[:MAX_SAID_CHARS])
            raise UnavailableError("advice took more time or memory than it may") from None
        if "error" in told:
            rule = f"must be a time of which there is advice, and {minutes} is none"
            raise RequestError("minutes", f"{rule}: {told['error']}")
        return dict(told)


class AdviceView(Struct):
    """As `llm_serving_simulator.advice.Advice`."""

    requests: int
    refused: int
    seconds: float
    step_error: float
    played: int
    not_played: int
    advised: list[dict[str, Any]]
    otherwise: list[dict[str, Any]]


async def show_advice(engine: AsyncEngine, http_request: Request) -> Response:
    """Plays the requests of the last minutes under neighbours of the configuration, until its client leaves."""
    check_operator(http_request)
    given = http_request.query_params.get("minutes", str(MINUTES))
    if not (given.isascii() and given.isdecimal() and len(given) < 4 and 1 <= int(given) <= MAX_MINUTES):
        raise RequestError("minutes", f"must be an integer from 1 to {MAX_MINUTES}", given)
    work = http_request.app.advisor.advise(int(given))
    return json_response(await run_until_client_leaves(http_request.receive, work))


ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/v1/scheduler/advice",
        show_advice,
        "Tell what would have been better",
        answer=AdviceView,
        query={"minutes": {"type": "integer", "minimum": 1, "maximum": MAX_MINUTES}},
    ),
)
