"""Vectors and scores of small encoders and rerankers are those of `transformers`, and depend on the text alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from families import encoders
from families.encoder_precision import Served, largest_error
from llm_serving.config import load_config
from llm_serving.core.step import StepInput
from llm_serving.errors import ContextLengthError, ModelError, WorkerDiedError
from llm_serving.models.pooling import resolve_pooling
from llm_serving.models.weight_reader import check_folder
from llm_serving.offline import LLM
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

pytestmark = pytest.mark.mindspore


@pytest.mark.parametrize("name", encoders.models())
def test_encoder_gives_the_values_of_transformers(name: str) -> None:
    assert largest_error(name, "float32") <= 1e-5


@pytest.mark.parametrize("name", encoders.models())
def test_encoder_pooling_follows_its_folder(tmp_path: Path, name: str) -> None:
    model = encoders.models()[name]
    encoders.write(name, tmp_path)
    pooling = resolve_pooling("auto", tmp_path, check_folder(tmp_path))
    assert pooling is not None
    assert (pooling.mode, pooling.scores, pooling.normalises) == (
        model.pooling,
        model.is_reranker,
        not model.is_reranker,
    )


@pytest.mark.parametrize("name", ["bert", "xlm-roberta-reranker", "modernbert"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoder_is_batch_invariant(tmp_path: Path, name: str, dtype: str) -> None:
    served = Served(name, tmp_path, dtype)
    lengths = encoders.LENGTHS
    alone = [served.answers(served.harness(), length)[0].tobytes() for length in lengths]
    for options in ({}, {"max_num_batched_tokens": 256}, {"max_num_seqs": 2}, {"max_long_prefill_tokens": 16}):
        together = served.answers(served.harness(**options), *lengths)
        assert [vector.tobytes() for vector in together] == alone, options


def test_encoder_answers_after_the_death_of_its_work_agent(tmp_path: Path) -> None:
    served = Served("modernbert", tmp_path)
    harness = served.harness(max_num_batched_tokens=256)
    deaths = [0, 1]

    def die(step: StepInput) -> None:
        if deaths and step.step == deaths[0]:
            del deaths[0]
            raise WorkerDiedError("killed")

    harness.executor.spoil = die
    found = served.answers(harness, *encoders.LENGTHS)
    alone = [served.answers(served.harness(), length)[0] for length in encoders.LENGTHS]
    assert harness.executor.num_restarts == 2
    assert [vector.tobytes() for vector in found] == [vector.tobytes() for vector in alone]


def test_encoder_in_bfloat16_is_close(tmp_path: Path) -> None:
    served = Served("xlm-roberta", tmp_path, "bfloat16")
    golden = encoders.golden("xlm-roberta")
    for expected, vector in zip(golden.values(), served.answers(served.harness(), *golden), strict=True):
        cosine = float(vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected))
        assert cosine > 0.999


def test_offline_encoder_gives_golden_vectors_and_refuses_long_inputs(tmp_path: Path) -> None:
    """By default, a step holds the longest input. With a smaller token budget, longer inputs are refused."""
    encoders.write("bert", tmp_path)
    words = {f"<{number}>": number for number in range(encoders.VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = ["model_config.model_dtype=float32", "pa_config.num_blocks=64", "model_config.decode_batch_size=4"]
    model = LLM(load_config(None, settings, tmp_path))
    assert model.engine.scheduler.limits.max_num_batched_tokens >= 256
    golden = encoders.golden("bert")
    texts = [(ids + types * encoders.VOCAB).tolist() for ids, types in (encoders.prompt("bert", n) for n in golden)]
    for _ in range(2):
        for vector, expected in zip(model.embed(texts), golden.values(), strict=True):
            assert np.abs(vector - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
    model = LLM(load_config(None, [*settings, "scheduler_config.max_prefill_tokens=150"], tmp_path))
    model.embed(texts[:3])
    with pytest.raises(ContextLengthError):
        model.embed(texts[3:])


def test_encoder_is_refused_by_graphs_of_cells(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="bidirectional attention"):
        Served("bert", tmp_path, as_program=False)
