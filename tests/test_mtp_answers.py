"""The offline engine with a layer for multi-token prediction (MTP): the answers are those of a server without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from llm_serving.config import load_config
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.offline import LLM
from llm_serving.speculation import DraftModelProposer, SpeculationController
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


def counted(model: LLM, name: str) -> float:
    """Return a counter of the draft tokens of the MTP layer."""
    line = f'vllm:spec_decode_num_{name}_tokens_total{{model_name="{model.config.model.model_name}",proposer="mtp"}}'
    found = [each for each in model.metrics.render()[0].decode().splitlines() if each.startswith(line)]
    return float(found[0].rsplit(" ", 1)[1])


def test_mtp_keeps_the_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, with hits of the prefix cache, and with preemption, from right and from wrong drafts."""
    plain = llm(folder, "none")
    reference = [answers(plain, [each])[0] for each in REQUESTS]
    monkeypatch.setattr(
        SpeculationController, "pays", property(lambda self: True, lambda self, value: None), raising=False
    )
    monkeypatch.setattr(DraftModelProposer, "pass_s", property(lambda self: 0.0), raising=False)
    model = llm(folder, "mtp", num_blocks=14)
    assert answers(model, REQUESTS) == reference
    assert [answers(model, [each])[0] for each in REQUESTS] == reference
    drafted, accepted = counted(model, "draft"), counted(model, "accepted")
    assert drafted > 60
    assert 0.2 * drafted < accepted < drafted
