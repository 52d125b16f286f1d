"""The offline engine with a layer for multi-token prediction (MTP) gives the same answers as without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from llm_serving.config import load_config
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.offline import LLM
from llm_serving.speculation import SpeculationController
from llm_serving.speculation.controller import GainModel
from llm_serving.speculation.statistics import RequestStatistics
from support.fakes import DEMO_FOLDER, DEMO_TOKENIZER
from support.mtp_models import write_predictable_model

pytestmark = pytest.mark.mindspore

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.7, seed=3)
PROMPTS = [
    "Add 17 and 25.",
    "Count from 1 to 30.",
    "Sort these words: plum kite ant. " * 4,
    "Sort these words: plum kite ant. " * 4 + "Now.",
]
REQUESTS = [(prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, SAMPLED)]
Answer = tuple[tuple[int, ...], tuple[object, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_predictable_model(folder, DEMO_FOLDER, DEMO_TOKENIZER.vocab_size)
    return folder


def llm(folder: Path, method: str, num_blocks: int = 64) -> LLM:
    settings = (
        "scheduler_config.num_speculative_tokens=4",
        f"scheduler_config.speculative_method={method}",
        f"pa_config.num_blocks={num_blocks}",
    )
    return LLM(load_config(None, [*settings, "scheduler_config.max_prefill_tokens=48",
                                  "model_config.decode_batch_size=8"], folder))  # fmt: skip


def answers(model: LLM, requests: Sequence[tuple[str, SamplingParams]]) -> list[Answer]:
    outputs = model.generate([prompt for prompt, _ in requests], [sampling for _, sampling in requests])
    model.engine.scheduler.check_integrity()
    return [(output.token_ids, output.logprobs) for output in outputs]


def counter(model: LLM, name: str, proposer: str | None = None) -> float:
    (found,) = (
        sample.value
        for family in model.metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"vllm:{name}_total" and sample.labels.get("proposer") == proposer
    )
    return found


def test_mtp_keeps_the_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, with hits of the prefix cache, and with preemption, from right and from wrong drafts."""
    plain = llm(folder, "none")
    reference = [answers(plain, [each])[0] for each in REQUESTS]
    monkeypatch.setattr(
        SpeculationController, "pays", property(lambda self: True, lambda self, value: None), raising=False
    )
    monkeypatch.setattr(GainModel, "draft_length", lambda self, acceptance, proposing_s=0.0: 4)
    monkeypatch.setattr(RequestStatistics, "may_use_model", lambda self, num_output_tokens: True)
    model = llm(folder, "mtp", num_blocks=11)
    assert answers(model, REQUESTS) == reference
    assert [answers(model, [each])[0] for each in REQUESTS] == reference
    assert counter(model, "num_preemptions") > 0
    drafted, accepted = (counter(model, f"spec_decode_num_{name}_tokens", "mtp") for name in ("draft", "accepted"))
    assert drafted > 100
    assert 0.2 * drafted < accepted < drafted
