"""Several answers to a prompt on a real network: each equals the reference answer to the last bit of its logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput, TokenLogprobs, join_pieces
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.step import BlockMoveKind, StepInput, StepOutput
from llm_serving.engine.beam_search import BeamSearch, LikelyTokens
from llm_serving.scheduler import PreemptionMode
from llm_serving.server.generation.sampling import with_choice_seed
from llm_serving.worker.model_runner import ModelRunner
from support.engine_harness import Harness
from support.factories import create_request
from support.graph_model import BLOCK_SIZE, backend
from support.model_factories import tiny_spec, write_model

pytestmark = pytest.mark.mindspore

SPEC = tiny_spec()
PROMPT = np.random.default_rng(11).integers(0, SPEC.vocab_size, 40).tolist()
STOPS = frozenset(range(0, SPEC.vocab_size, 9))
WIDTH, MAX_TOKENS = 3, 12
SEARCH = BeamSearchParams(width=WIDTH, num_returned=WIDTH)
TINY_CACHE = 7
"""Blocks. One answer takes 4 of them, four forks together 10, three beams up to 8."""

Answer = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]


class ModelHarness(Harness):
    """A harness over a real network that records block moves."""

    def __init__(self, runner: ModelRunner, **scheduler: Any) -> None:
        super().__init__(block_size=BLOCK_SIZE, **scheduler)
        self._model = runner
        self.moves: set[BlockMoveKind] = set()
        self.executor.next_step = runner._next_step
        self.runner.execute = self._execute  # type: ignore[method-assign]

    def _execute(self, step: StepInput) -> StepOutput:
        self.moves.update(BlockMoveKind(kind) for kind in step.block_moves[:, 0].tolist())
        return self._model.execute(step)

    @property
    def num_preemptions(self) -> float:
        return self.metrics.registry.get_sample_value("vllm:num_preemptions_total", {"model_name": "model"}) or 0.0

    def answer(self, request: Request) -> RequestOutput:
        return join_pieces(self.pieces[request.request_id])


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, SPEC)
    return ModelRunner(
        SPEC,
        folder,
        backend("cpu", "bfloat16"),
        num_blocks=32,
        block_size=BLOCK_SIZE,
        max_model_len=128,
        num_swap_blocks=16,
    )


def choices() -> list[Request]:
    """Return the requests that an HTTP request with n = 4 submits."""
    requests: list[Request] = []
    for choice in range(4):
        request = create_request(max_tokens=MAX_TOKENS, temperature=1.2, seed=5, logprobs=2)
        request.prompt_token_ids, request.sampling = PROMPT, with_choice_seed(request.sampling, choice)
        request.fork_of = requests[0].request_id if requests else None
        requests.append(request)
    return requests


def beams() -> Request:
    request = create_request(max_tokens=MAX_TOKENS, stop_token_ids=STOPS, logprobs=2)
    request.prompt_token_ids, request.beam_search = PROMPT, SEARCH
    return request


def bytes_of(output: RequestOutput) -> Answer:
    return output.token_ids, output.logprobs


def run_alone(runner: ModelRunner, request: Request) -> RequestOutput:
    request.fork_of = None
    harness = ModelHarness(runner, num_blocks=32, ahead=False)
    harness.engine.submit(request)
    harness.run()
    return harness.answer(request)


@pytest.fixture(scope="module")
def expected_choices(runner: ModelRunner) -> list[Answer]:
    return [bytes_of(run_alone(runner, request)) for request in choices()]


@pytest.fixture(scope="module")
def expected_beams(runner: ModelRunner) -> list[Answer]:
    """Return the result of a beam search computed by plain requests for one token each."""
    search = BeamSearch(SEARCH, MAX_TOKENS, STOPS)
    while not search.has_ended:
        likely = []
        for beam in search.live:
            request = create_request(max_tokens=1, logprobs=2 * WIDTH)
            request.prompt_token_ids = PROMPT + [token.token_id for token in beam.tokens()]
            (token,) = run_alone(runner, request).logprobs
            likely.append(LikelyTokens(token.top_token_ids, token.top_logprobs))
        search.advance(likely)
    answers = []
    for best in search.best():
        tokens = best.hypothesis.tokens()
        logprobs = tuple(
            TokenLogprobs(each.token_id, each.logprob, each.likely.token_ids[:2], each.likely.logprobs[:2])
            for each in tokens
        )
        answers.append((tuple(token.token_id for token in tokens), logprobs))
    return answers


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "preemption_mode"),
    [(32, PreemptionMode.RECOMPUTE), (TINY_CACHE, PreemptionMode.RECOMPUTE), (TINY_CACHE, PreemptionMode.SWAP)],
)
def test_forks_and_beams_on_a_model_equal_the_reference_answers(
    runner: ModelRunner,
    expected_choices: list[Answer],
    expected_beams: list[Answer],
    num_blocks: int,
    preemption_mode: PreemptionMode,
    ahead: bool,
    prefix_caching: bool,
) -> None:
    harness = ModelHarness(
        runner,
        num_blocks=num_blocks,
        num_swap_blocks=16,
        preemption_mode=preemption_mode,
        max_num_batched_tokens=16,
        prefix_caching=prefix_caching,
        ahead=ahead,
    )
    forks, search = choices(), beams()
    for request in (*forks, search):
        harness.engine.submit(request)
    harness.run()
    assert [bytes_of(harness.answer(request)) for request in forks] == expected_choices
    assert [bytes_of(output) for output in harness.answer(search).beams] == expected_beams
    assert len({tokens for tokens, _ in expected_choices}) == 4
    assert (harness.num_preemptions > 0) == (num_blocks == TINY_CACHE)
    swaps = preemption_mode is PreemptionMode.SWAP
    assert ({BlockMoveKind.SWAP_OUT, BlockMoveKind.SWAP_IN} <= harness.moves) == swaps
    assert harness.scheduler.blocks.pool.num_used_blocks == 0
