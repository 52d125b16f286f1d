"""Building an engine: what follows from the size of the KV cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.core.window import LayerWindow
from llm_serving.engine.replica import build_engine
from llm_serving.executor.executor import LocalExecutor
from llm_serving.observability.metrics import Metrics
from support.fake_runner import FakeRunner
from support.word_tokenizer import WordTokenizer


@pytest.mark.parametrize(
    ("num_blocks", "longest", "reason"),
    [
        (100, 1600, "a request has up to 1600 tokens, as many as the KV cache holds (131072: model config.json)"),
        (10000, 131072, "a request has up to 131072 tokens (model config.json)"),
    ],
)
def test_longest_request_is_limited_by_the_model_or_the_cache(num_blocks, longest, reason, caplog):
    config = replace(
        ServingConfig(model=ModelConfig(max_generate_length=131072, decode_batch_size=4)),
        sources={"model_config.max_generate_length": "model config.json"},
    )
    tokenizer: Any = WordTokenizer()
    caplog.set_level(logging.INFO, "llm_serving")
    executor = LocalExecutor(FakeRunner(num_blocks, 16))
    engine = build_engine(config, num_blocks, executor, tokenizer, Metrics(), lambda pieces: None)
    assert engine.scheduler.limits.max_model_len == longest
    assert reason in caplog.text


def test_longest_request_with_a_sliding_window_may_exceed_the_cache(caplog):
    """A window of 4,096 tokens and a step of 512 need at most 289 blocks of 16 tokens."""
    config = ServingConfig(
        model=ModelConfig(max_generate_length=32768, decode_batch_size=4),
        scheduler=SchedulerConfig(max_prefill_tokens=512),
    )
    caplog.set_level(logging.INFO, "llm_serving")
    executor, tokenizer = LocalExecutor(FakeRunner(300, 16)), WordTokenizer()
    windows = (LayerWindow(4096),)
    engine = build_engine(config, 300, executor, tokenizer, Metrics(), lambda pieces: None, windows=windows)
    assert engine.scheduler.limits.max_model_len == 32768
    assert engine.scheduler.blocks.max_blocks_of(32000) == 289
    assert "holds at most 289 blocks: every layer sees 4096 tokens" in caplog.text
