"""Answers of one model of each kind of family are batch-invariant; `families.exactness` tests all models."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from families import models
from families.exactness import CODED_CACHE, Served, differing
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import ModelError
from support.engine_harness import bytes_of
from support.real_replica import RealReplica
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

pytestmark = pytest.mark.mindspore


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("mistral", "program"),
        ("gemma4-moe", "program"),
        ("llama4", "program"),
        ("qwen3-moe", "program"),
        ("deepseek-v2", "program"),
        ("glm-5", "program"),
        ("gemma2", CODED_CACHE),
        ("lfm2", "program"),
        ("qwen3.5", "program"),
        ("granite-hybrid", "program"),
    ],
)
def test_answers_of_families_are_batch_invariant(tmp_path: Path, name: str, kernels: str) -> None:
    assert not differing(Served(name, tmp_path, kernels))


def test_int8_kv_cache_of_latent_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="an int8 KV cache does not support attention to latent keys"):
        Served("deepseek-v2", tmp_path, CODED_CACHE)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Token i is the word "<i>"."""
    words = {f"<{number}>": number for number in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", ["mixtral-window", "gemma3", "lfm2-moe"])
def test_answer_survives_a_work_agent_restart(tmp_path: Path, name: str) -> None:
    """A model with windows and experts, one with groups of layers, and one with states and experts."""
    models.write(name, tmp_path)
    write_tokenizer(tmp_path, models.model(name).config["vocab_size"])
    prompt = models.golden(name).prompts[max(models.golden(name).prompts)].token_ids.tolist()[:150]
    greedy = SamplingParams(max_tokens=16, temperature=0.0, logprobs=2)

    def requests() -> list[Request]:
        return [Request(f"{length}", prompt[:length], greedy) for length in (150, 40)]

    settings = ("pa_config.num_blocks=24", "scheduler_config.max_prefill_tokens=64", "model_config.decode_batch_size=4")
    replica = RealReplica(*settings, model=tmp_path)
    try:
        alone = [bytes_of(replica.answer([each])[0]) for each in requests()]
        replica.begin(requests())
        os.kill(replica.agents[-1].process.pid, signal.SIGKILL)
        assert [bytes_of(each) for each in replica.finish(requests())] == alone
        assert replica.num_restarts == 1
    finally:
        replica.close()
