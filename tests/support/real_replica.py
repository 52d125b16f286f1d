"""An engine that the test steps, over a real WorkAgent process with the shipped model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

from llm_serving.config import load_config
from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput, join_pieces
from llm_serving.engine.replica import build_engine
from llm_serving.executor import placement as local
from llm_serving.executor.placement import Placement
from llm_serving.executor.supervisor import LOCAL_PLACEMENT, SupervisedExecutor, WorkAgentProcess, start_work_agent
from llm_serving.executor.worker_process import LocalProcess
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.metrics import Metrics
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from llm_serving.transport.messages import Loaded
from support.agent_forks import ForkedProcess
from support.server_process import ONE_THREAD

MAX_STEPS = 5000
NUM_BLOCKS = 256
"""Default number of blocks: a WorkAgent needs longer to clear a cache of all memory than to load the model."""


class RealReplica:
    """A replica without HTTP server; must be closed."""

    def __init__(
        self,
        *settings: str,
        model: Path = Path("demo"),
        placement: Placement = LOCAL_PLACEMENT,
        process: Callable[..., LocalProcess] = ForkedProcess,
    ) -> None:
        """`settings` are overrides such as "pa_config.num_blocks=36"; `placement` starts the WorkAgents, which are
        processes of the class `process` if they are local.
        """
        self._placement, self._process = placement, process
        common = ["serving_config.audit_every=0", f"pa_config.num_blocks={NUM_BLOCKS}", ONE_THREAD]
        self.config = load_config(None, [*common, *settings], model)
        self.tokenizer = Tokenizer.load(self.config.model.model_path)
        self.agents: list[WorkAgentProcess] = []
        """All started WorkAgents, the live one last."""
        serving = self.config.serving
        self.executor = SupervisedExecutor(self._start, serving.step_timeout_s, serving.max_worker_restarts)
        self._pieces: dict[str, list[RequestOutput]] = defaultdict(list)
        loaded = self.executor.loaded
        spec = ModelSpec.from_folder(self.config.model.model_path)
        self.engine = build_engine(
            self.config,
            loaded.num_blocks,
            self.executor,
            self.tokenizer,
            Metrics(),
            self._publish,
            num_swap_blocks=loaded.num_swap_blocks,
            windows=loaded.windows,
            num_state_slots=self.config.num_state_slots(spec.state_bytes),
        )

    @property
    def num_restarts(self) -> int:
        return len(self.agents) - 1

    def answer(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Run the requests to their end."""
        for request in requests:
            self.engine.submit(request)
        return self.finish(requests)

    def begin(self, requests: Sequence[Request]) -> None:
        """Run the requests until one has a token; the number of later steps depends on the drafts."""
        for request in requests:
            self.engine.submit(request)
        while not self._pieces:
            assert self.engine.step()

    def finish(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Run the unfinished requests to their end."""
        for _ in range(MAX_STEPS):
            if not self.engine.step():
                return [self.take_answer(request.request_id) for request in requests]
        raise AssertionError("the engine does not come to an end")

    def take_answer(self, request_id: str) -> RequestOutput:
        """Return and remove the published outputs of a request, joined."""
        return join_pieces(self._pieces.pop(request_id))

    def close(self) -> None:
        self.executor.close()

    def _start(self, previous: Loaded | None, timeout_s: float | None) -> WorkAgentProcess:
        with patch.object(local, "LocalProcess", self._process):
            self.agents.append(
                start_work_agent(self.config, 0, lambda text: None, previous, timeout_s, None, self._placement)
            )
        return self.agents[-1]

    def _publish(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            self._pieces[piece.request_id].append(piece)
