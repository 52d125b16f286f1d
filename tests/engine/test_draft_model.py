"""A draft model that proposes while no step is in flight, correctly or not, or that dies."""

from __future__ import annotations

import random

import pytest
from llm_serving.core.enums import Proposer
from llm_serving.core.request_class import RequestClass
from llm_serving.core.step import DRAFT_WINDOW, MAX_DRAFT_REQUESTS
from llm_serving.errors import WorkerDiedError
from llm_serving.observability.event_log import EventLog
from llm_serving.speculation import DraftModelProposer, NgramProposer, SpeculationController
from llm_serving.speculation.draft_model import MAX_WORKER_DEATHS
from support.engine_harness import Harness, bytes_of
from support.factories import create_request
from support.fake_runner import VOCAB_SIZE, next_token
from support.fragile_harness import FragileHarness


class FakeDraftModel:
    """A draft model that knows the output of the fake model; it is sometimes wrong, or dies."""

    def __init__(self, rng: random.Random, wrong: float = 0.0, dies: float = 0.0) -> None:
        self._rng, self._wrong, self._dies = rng, wrong, dies
        self.asked: list[list[int]] = []

    def propose(self, requests):
        assert 0 < len(requests) <= MAX_DRAFT_REQUESTS
        assert len({each.key for each in requests}) == len(requests)
        self.asked.append([each.num_draft_tokens for each in requests])
        if self._rng.random() < self._dies:
            raise WorkerDiedError("killed")
        return [self._go_on(each) for each in requests]

    def _go_on(self, asked) -> list[int]:
        assert 0 < len(asked.token_ids) <= DRAFT_WINDOW
        assert asked.start == 0
        text = list(asked.token_ids)
        for _ in range(asked.num_draft_tokens):
            right = self._rng.random() >= self._wrong
            text.append(next_token(text, asked.seed) if right else self._rng.randrange(VOCAB_SIZE))
        return text[len(asked.token_ids) : len(text) - (self._rng.random() < self._wrong)]


class EagerController(SpeculationController):
    """A controller whose drafts pay as the test decides, because the harness clock only counts calls."""

    share = 1.0
    rng = random.Random(0)

    @property
    def pays(self) -> bool:
        return self.rng.random() < self.share

    @pays.setter
    def pays(self, value: bool) -> None:
        pass


def proposing(rng=None, wrong=0.0, dies=0.0, harness=Harness, share=1.0, **options):
    """Return an engine whose executor has a draft model."""
    rng = rng or random.Random(1)
    fake = FakeDraftModel(rng, wrong, dies)
    drafter = EagerController(
        8, NgramProposer(3), DraftModelProposer(lambda asked: made.executor.propose(asked), 16, lambda: 0.0)
    )
    drafter.share, drafter.rng = share, rng
    made = harness(drafter=drafter, block_size=16, **options)
    made.executor._draft_model = made.fake = fake
    return made


def run(harness, requests) -> list[str]:
    for request in requests:
        harness.engine.submit(request)
    harness.run()
    return [bytes_of(harness.answer(request.request_id)) for request in requests]


def test_accepted_draft_model_tokens_save_steps_and_are_counted_by_proposer() -> None:
    harness = proposing(event_log=EventLog(16, 0))
    (answers,) = run(harness, [create_request(4, request_id="a", max_tokens=64)])
    assert [answers] == run(Harness(block_size=16), [create_request(4, request_id="a", max_tokens=64)])
    assert 2 * len(harness.runner.steps) < 64
    num_accepted = 64 - len(harness.runner.steps)
    by_proposer = harness.metrics.draft_tokens["vllm:spec_decode_num_accepted_tokens_total"]
    assert by_proposer == dict.fromkeys(Proposer, 0) | {Proposer.DRAFT_MODEL: num_accepted}
    labels = '{model_name="model",proposer="draft_model"}'
    assert f"vllm:spec_decode_num_accepted_tokens_total{labels} {num_accepted:.1f}" in metrics_text(harness)
    assert all(sum(each) <= 8 for each in harness.fake.asked)


def metrics_text(harness) -> str:
    return harness.metrics.render()[0].decode()


def test_draft_model_pauses_after_rejected_drafts() -> None:
    harness = proposing(wrong=1.0)
    run(harness, [create_request(4, request_id="a", max_tokens=200)])
    assert 2 <= len(harness.fake.asked) <= 6  # of 200 tokens: tried again after 32 tokens, then after 64
    assert sum(harness.metrics.draft_tokens["vllm:spec_decode_num_accepted_tokens_total"].values()) == 0


def test_draft_model_without_proposals_is_queried_rarely() -> None:
    harness = proposing()
    harness.fake._go_on = lambda asked: []
    run(harness, [create_request(max_tokens=200, request_id="r")])
    assert 0 < len(harness.fake.asked) <= 16


def test_draft_model_is_not_queried_while_a_prompt_waits_or_is_computed() -> None:
    harness = proposing(max_num_batched_tokens=16)
    harness.engine.submit(create_request(4, request_id="a", max_tokens=60))
    for _ in range(4):
        harness.engine.step()
    assert harness.fake.asked
    late = create_request(60, request_id="b", max_tokens=3)
    harness.engine.submit(late)
    num_asked = len(harness.fake.asked)
    while not late.output_token_ids:
        harness.engine.step()
    assert all(len(each) == 2 for each in harness.fake.asked[num_asked:])  # when both go on
    harness.run()
    assert len(harness.fake.asked) > num_asked


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("arrival_steps", "num_blocks"), [(0, 64), (3, 64), (0, 12)])
def test_draft_model_is_not_queried_before_a_step_that_admits_a_request(
    ahead: bool, arrival_steps: int, num_blocks: int
) -> None:
    """With free slots, or once a running request has ended and made room for one of the queue."""
    harness = proposing(ahead=ahead, max_num_seqs=4, num_blocks=num_blocks)
    schedule, num_asked, verified = harness.scheduler.schedule, 0, []

    def noted(now):
        nonlocal num_asked
        step = schedule(now)
        if len(harness.fake.asked) > num_asked:
            num_asked = len(harness.fake.asked)
            verified.append(step is not None and step.has_draft_tokens)
        return step

    harness.scheduler.schedule = noted
    rng = random.Random(1)
    for index in range(40):
        harness.engine.submit(create_request(rng.randint(1, 12), max_tokens=rng.randint(10, 60), seed=index))
        for _ in range(arrival_steps):
            harness.engine.step()
    harness.run()
    assert len(verified) > 30 and all(verified)


def test_draft_model_prefers_requests_of_higher_classes() -> None:
    drafter = SpeculationController(8, NgramProposer(3), DraftModelProposer(lambda asked: [], 16))
    requests = [create_request(4, priority=index % 2) for index in range(40)]
    for index, request in enumerate(requests):
        request.sequence = index
        request.request_class = RequestClass(name=f"rank-{index % 2}", rank=index % 2)
    taken = drafter._model.select(requests)
    assert [each.sequence for each in taken] == [*range(0, 32, 2)]


def mixed_load(rng):
    return [
        create_request(
            rng.randint(1, 40),
            request_id=str(index),
            priority=rng.choice([-1, 0, 1]),
            max_tokens=rng.randint(1, 60),
            logprobs=rng.choice([None, 2]),
            seed=rng.randrange(3),
        )
        for index in range(rng.randint(1, 10))
    ]


@pytest.mark.parametrize("seed", range(30))
def test_answers_do_not_depend_on_draft_model_proposals(seed: int) -> None:
    """Also with a small cache and preemptions, and with a WorkAgent that dies while it proposes."""
    rng = random.Random(seed)
    cache = {"num_blocks": rng.choice([8, 64]), "preemption_mode": rng.choice(["recompute", "swap"])}
    cache["num_swap_blocks"] = 8 if cache["preemption_mode"] == "swap" else 0
    fragile = {"harness": FragileHarness, "dies": 0.1} if seed % 3 == 0 else {}
    harness = proposing(rng, rng.choice([0.0, 0.2, 0.6]), share=rng.choice([0.7, 1.0]), **fragile, **cache)
    answers = run(harness, mixed_load(random.Random(1000 + seed)))
    assert answers == run(Harness(block_size=16), mixed_load(random.Random(1000 + seed)))
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


def test_draft_model_that_kills_its_workers_is_disabled() -> None:
    harness = proposing(dies=1.0, harness=FragileHarness)
    requests = [create_request(4, request_id="a", max_tokens=30)]
    harness.submit(*requests)
    harness.run()
    harness.assert_exact(*requests)
    assert harness.executor.num_restarts == len(harness.fake.asked) == MAX_WORKER_DEATHS
