"""The offline engine with the shipped model; the answers at batch size 1 are the reference of all tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from llm_serving.config import load_config
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.offline import LLM
from llm_serving.speculation import DraftModelProposer, SpeculationController
from llm_serving.text.structured_output.grammars import json_grammar
from support.schemas import fault_of

pytestmark = pytest.mark.mindspore

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=3)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.9, seed=7, max_tokens=40, logprobs=2, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=40, logprobs=0, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"enum": [42, 43]}, "word": {"type": "string", "maxLength": 12}},
    "required": ["sum", "word"],
    "additionalProperties": False,
}
CONSTRAINED = SamplingParams(seed=3, max_tokens=60, logprobs=1, constraint=json_grammar(json.dumps(SCHEMA), " ").text)
PROMPTS = [
    "Add 17 and 25.",
    "Count from 1 to 30.",
    "Copy this sentence: the quick fox naps.",
    "Sort these words: plum kite ant. " * 12,
]
REQUESTS = [(prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, SAMPLED, PENALISED, CONSTRAINED)]

Answer = tuple[str, tuple[int, ...], tuple[object, ...], object]


def llm(*overrides: str) -> LLM:
    return LLM(load_config(None, ["pa_config.num_blocks=256", *overrides], Path("demo")))


def answer(output: RequestOutput) -> Answer:
    return output.text, output.token_ids, output.logprobs, output.finish_reason


def together(model: LLM) -> list[Answer]:
    prompts, samplings = zip(*REQUESTS, strict=True)
    outputs = model.generate(list(prompts), list(samplings))
    model.engine.scheduler.check_integrity()
    assert model.engine.scheduler.blocks.pool.num_used_blocks == 0
    return [answer(output) for output in outputs]


@pytest.fixture(scope="module")
def model() -> LLM:
    return llm()


@pytest.fixture(scope="module")
def reference(model: LLM) -> list[Answer]:
    return [answer(model.generate([prompt], sampling)[0]) for prompt, sampling in REQUESTS]


def test_prompt_logprobs_equal_the_logprobs_of_the_same_output(model: LLM) -> None:
    prompt = model.tokenizer.encode(PROMPTS[1])
    given = model.generate([prompt], GREEDY)[0]
    whole = [*prompt, *given.token_ids]
    for _ in range(2):
        received = model.generate([whole, PROMPTS[0]], replace(GREEDY, max_tokens=0, prompt_logprobs=3))[0]
        assert received.prompt_logprobs is not None
        assert (received.token_ids, received.num_cached_tokens) == ((), 0)
        assert tuple(received.prompt_logprobs.tokens(3)[len(prompt) - 1 :]) == given.logprobs


def test_vectors_are_batch_invariant(model: LLM) -> None:
    together = model.embed(PROMPTS)
    reference = [model.embed([prompt])[0] for prompt in PROMPTS]
    assert [vector.shape for vector in reference] == [(model.model_spec.network.hidden,)] * len(PROMPTS)
    assert [vector.tobytes() for vector in together] == [vector.tobytes() for vector in reference]
    assert len({vector.tobytes() for vector in reference}) == len(PROMPTS)


def test_batch_answers_equal_the_reference_answers(model: LLM, reference: list[Answer]) -> None:
    assert together(model) == reference


def test_finished_answers_fit_their_schema(reference: list[Answer]) -> None:
    """Constrained answers must fit whatever the model would generate; the batches and caches of other tests change
    none.
    """
    constrained = [text for (text, _, _, reason), (_, sampling) in zip(reference, REQUESTS, strict=True)
                   if sampling is CONSTRAINED and reason == "stop"]  # fmt: skip
    assert constrained
    assert all(fault_of(SCHEMA, text) is None for text in constrained)


def test_small_chunks_keep_the_answers(reference: list[Answer]) -> None:
    assert together(llm("scheduler_config.max_prefill_tokens=16", "model_config.decode_batch_size=16")) == reference


@pytest.mark.parametrize("num_swap_blocks", [0, 24])
def test_preemption_keeps_the_answers(reference: list[Answer], num_swap_blocks: int) -> None:
    host_pool = (f"pa_config.num_swap_blocks={num_swap_blocks}", "scheduler_config.preemption_mode=auto")
    small = llm("pa_config.num_blocks=24", *(host_pool if num_swap_blocks else ()))
    assert small.engine.scheduler.blocks.host_pool.num_blocks == num_swap_blocks
    assert together(small) == reference
    preemptions = next(
        sample.value
        for family in small.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "vllm:num_preemptions_total"
    )
    assert preemptions > 0, "the cache is meant to be too small"


def test_static_batching_and_fcfs_keep_the_answers(reference: list[Answer]) -> None:
    static = ("model_config.batching_strategy=static", "model_config.decode_batch_size=5")
    model = llm("scheduler_config.policy=fcfs", *static)
    assert together(model) == reference
    with pytest.raises(RequestError, match="is not supported with model_config"):
        model.beam_search(PROMPTS[:1], BeamSearchParams(width=2), GREEDY)
    assert not model.engine.has_unfinished_requests


def test_draft_model_keeps_the_answers(reference: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is its own draft model, so nearly all draft tokens are right, also for sampled answers."""
    monkeypatch.setattr(
        SpeculationController, "pays", property(lambda self: True, lambda self, value: None), raising=False
    )
    model = llm("scheduler_config.speculative_method=draft_model", "scheduler_config.draft_model_path=demo")
    monkeypatch.setattr(DraftModelProposer, "pass_s", property(lambda self: 0.0), raising=False)
    assert together(model) == reference
    for index in (0, 1, 5):  # in a batch of one request most tokens are proposed
        prompt, sampling = REQUESTS[index]
        assert answer(model.generate([prompt], sampling)[0]) == reference[index]
    received = model.metrics.render()[0].decode()
    counts = [
        float(line.rsplit(" ", 1)[1])
        for name in ("draft", "accepted")
        for line in received.splitlines()
        if line.startswith(f"vllm:spec_decode_num_{name}_tokens_total") and 'proposer="draft_model"' in line
    ]
    assert counts[0] > 100
    assert counts[1] > 0.5 * counts[0]


def test_beam_search_of_width_1_is_greedy(model: LLM) -> None:
    sampling = replace(GREEDY, ignore_eos=True, max_tokens=8)
    found = model.beam_search(PROMPTS, BeamSearchParams(width=1), sampling)
    assert [answer(best) for (best,) in found] == [answer(output) for output in model.generate(PROMPTS, sampling)]


def test_beam_search_gives_the_same_answers_alone_and_in_a_small_cache(model: LLM) -> None:
    search, sampling = BeamSearchParams(width=3, num_returned=2), replace(GREEDY, max_tokens=24)
    reference = [model.beam_search([prompt], search, sampling)[0] for prompt in PROMPTS]
    chunks = ("scheduler_config.max_prefill_tokens=16", "model_config.decode_batch_size=16")
    small = llm("pa_config.num_blocks=16", *chunks)
    together = small.beam_search(PROMPTS, search, sampling)
    assert [[answer(output) for output in best] for best in together] == [
        [answer(output) for output in best] for best in reference
    ]
    for best in reference:
        scores = [sum(token.logprob for token in output.logprobs) / len(output.logprobs) for output in best]
        assert len(scores) == 2
        assert scores == sorted(scores, reverse=True)
    assert small.engine.scheduler.blocks.pool.num_used_blocks == 0


def test_requests_that_can_never_be_served_are_refused(model: LLM) -> None:
    with pytest.raises(ContextLengthError, match="must be at most"):
        model.generate(["Add 1 and 2."], SamplingParams(max_tokens=100_000))
    with pytest.raises(RequestError, match="must hold token ids from 0 to"):
        model.generate([[1, 10**6]], GREEDY)
    with pytest.raises(RequestError, match="`prompts` must be a list of prompts"):
        model.generate("Add 1 and 2.", SamplingParams())
    with pytest.raises(RequestError, match="`prompts` must be a list of prompts"):
        model.embed("Add 1 and 2.")
    with pytest.raises(RequestError, match="at least one token"):
        model.generate([[]], GREEDY)
    with pytest.raises(RequestError, match="`priority` must be an integer from -1000000 to 1000000"):
        model.generate(["Add 1 and 2."], GREEDY, priorities=[1_000_001])


def test_a_stream_loses_no_pieces_while_other_requests_run(model: LLM) -> None:
    whole = model.generate(PROMPTS[:2], GREEDY)
    pieces = []
    for _, piece in model.stream(PROMPTS[1:2], GREEDY):
        pieces.append(piece.text)
        if len(pieces) == 2:
            assert model.generate(PROMPTS[:1], GREEDY)[0].text == whole[0].text
    assert "".join(pieces) == whole[1].text
