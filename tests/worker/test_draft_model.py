"""A small draft model: its proposals after cached, new and rejected tokens."""

from __future__ import annotations

import pytest
from llm_serving.core.step import (
    DRAFT_WINDOW,
    MAX_DRAFT_REQUESTS,
    MAX_DRAFT_TOKENS,
    DraftRequest,
    blocks_per_draft_request,
)
from llm_serving.worker.draft_model import DraftModel
from llm_serving.worker.model_runner import ModelRunner
from support.graph_model import backend
from support.model_factories import tiny_spec, write_model
from support.step_factories import sampling_input, step_input

pytestmark = pytest.mark.mindspore

SPEC = tiny_spec()
PROMPT = [5, 17, 44, 3, 80, 21]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, SPEC)
    return folder


@pytest.fixture(scope="module")
def cpu():
    return backend("cpu", "bfloat16")


@pytest.fixture(scope="module")
def draft_runner(folder, cpu):
    blocks = MAX_DRAFT_REQUESTS * blocks_per_draft_request(16)
    return ModelRunner(SPEC, folder, cpu, blocks, 16, DRAFT_WINDOW + MAX_DRAFT_TOKENS)


@pytest.fixture
def model(draft_runner):
    model = DraftModel(draft_runner, SPEC.vocab_size)
    model._step = draft_runner._next_step
    return model


@pytest.fixture(scope="module")
def answer(folder, cpu):
    """Return the answer of the same weights as served model, greedily and with temperature, token by token."""
    answers = {}
    for temperature in (0.0, 1.0):
        runner = ModelRunner(SPEC, folder, cpu, num_blocks=8, block_size=16, max_model_len=64)
        text: list[int] = []
        new = PROMPT
        for step in range(20):
            sampling = sampling_input(1, temperature=temperature, seed=9, position=len(text) + len(new))
            output = runner.execute(step_input([(new, len(text), [1, 2])], step=step, sampling=sampling))
            text += new
            new = output.token_ids.tolist()
        answers[temperature] = (text + new)[len(PROMPT) :]
    return answers


def draft_request(token_ids, count=4, key=1, start=0, temperature=0.0):
    return DraftRequest(key, start, list(token_ids), count, temperature, 0, 1.0, 0.0, 9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_with_equal_weights_proposes_the_same_tokens(model, answer, temperature) -> None:
    """Also for sampled answers, because the draft model uses the random number of each position."""
    generated = answer[temperature]
    assert len(set(generated)) > 3
    for num_known in (0, 1, 3, 7, 8, 12):
        text = PROMPT + generated[:num_known]
        (proposed,) = model.propose([draft_request(text, 5, temperature=temperature)])
        assert proposed == generated[num_known : num_known + 5]


def test_rejected_draft_tokens_are_recomputed(model, answer) -> None:
    generated = answer[0.0]
    (proposed,) = model.propose([draft_request(PROMPT, 6)])
    other = [*PROMPT, *generated[:2], (generated[2] + 1) % SPEC.vocab_size]
    (after_other,) = model.propose([draft_request(other, 3)])
    assert after_other == proposed_alone(model, other, 3)
    assert model.propose([draft_request(PROMPT, 6)]) == [proposed] == [generated[:6]]


def proposed_alone(model, token_ids, count):
    (proposed,) = model.propose([draft_request(token_ids, count, key=1000)])
    return proposed


def test_proposals_in_a_batch_equal_those_alone(model) -> None:
    texts = [PROMPT[: 1 + index % 6] + [index] * (index % 4) for index in range(MAX_DRAFT_REQUESTS)]
    reference = [proposed_alone(model, text, 1 + index % 5) for index, text in enumerate(texts)]
    together = [draft_request(text, 1 + index % 5, key=index) for index, text in enumerate(texts)]
    for _ in range(2):
        assert model.propose(together) == reference
    assert model.propose([draft_request(texts[3], 1 + 3, key=77)]) == [reference[3]]  # in the slot of another request


def test_draft_model_only_computes_new_tokens(model, answer, monkeypatch) -> None:
    generated, computed = answer[0.0], []
    execute = model._runner.execute
    monkeypatch.setattr(model._runner, "execute", lambda step: computed.append(step.num_tokens) or execute(step))
    model.propose([draft_request(PROMPT, 4)])
    assert computed == [len(PROMPT), 1, 1, 1]
    computed.clear()
    # All draft tokens were right; the last one has not been computed.
    model.propose([draft_request(PROMPT + generated[:4], 2)])
    assert computed == [1, 1]


def test_continuations_above_the_limits_get_no_proposal(model) -> None:
    too_much = [
        draft_request([]),
        draft_request([1] * (DRAFT_WINDOW + 1)),
        draft_request(PROMPT, 0),
        draft_request(PROMPT, MAX_DRAFT_TOKENS + 1),
        draft_request([SPEC.vocab_size]),
        draft_request([-1]),
    ]
    for each in too_much:
        assert model.propose([each]) == [[]]
    many = [draft_request([1 + key] * 200, 1, key=key) for key in range(6)]
    assert [len(each) for each in model.propose(many)] == [1, 1, 1, 1, 1, 0]  # 1,024 tokens at a time
    assert [len(each) for each in model.propose(many)] == [1] * 6
    longest = [draft_request([1] * DRAFT_WINDOW, MAX_DRAFT_TOKENS)]
    assert [len(each) for each in model.propose(longest)] == [MAX_DRAFT_TOKENS]


def test_tokens_outside_the_large_vocabulary_are_not_proposed(draft_runner, answer) -> None:
    generated = answer[0.0]
    model = DraftModel(draft_runner, vocab_size=max(generated[:3]))
    model._step = draft_runner._next_step
    assert model.propose([draft_request(PROMPT, 3)]) == [generated[: generated.index(max(generated[:3]))]]


def test_a_failure_drops_all_cached_tokens(model, answer, monkeypatch) -> None:
    model.propose([draft_request(PROMPT, 4)])
    execute = model._runner.execute

    def fail(step):
        raise RuntimeError("no memory")

    monkeypatch.setattr(model._runner, "execute", fail)
    with pytest.raises(RuntimeError):
        model.propose([draft_request(PROMPT + answer[0.0][:2], 4)])
    monkeypatch.setattr(model._runner, "execute", execute)
    model._step = model._runner._next_step
    assert model.propose([draft_request(PROMPT, 4)]) == [answer[0.0][:4]]
    assert len(model._free) + len(model._slots) == MAX_DRAFT_REQUESTS
