"""Rows of one token, in which Ascend's exact attention computes a step, give the logits of the requests' own rows."""

import numpy as np
import pytest
from llm_serving.backends import create_backend
from llm_serving.config.sections.device import DeviceConfig
from llm_serving.worker.device import configure_device
from llm_serving.worker.model_inputs import ModelInputs
from llm_serving.worker.model_runner import ModelRunner
from support.model_factories import tiny_spec, write_model

pytestmark = pytest.mark.mindspore

SPEC = tiny_spec()
PROMPT, DECODE = 7, 1


def step(query_lens, num_computed):
    """Requests of which each has block `row` and then block `row` + 4."""
    lens, before = np.array(query_lens, np.int32), np.array(num_computed, np.int32)
    rows = np.repeat(np.arange(len(lens)), lens)
    positions = np.concatenate([np.arange(first, first + count) for first, count in zip(before, lens, strict=True)])
    tables = np.stack([np.arange(len(lens)), np.arange(len(lens)) + 4], axis=1)
    return ModelInputs(
        token_ids=(positions * 5 % SPEC.vocab_size).astype(np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=(tables[rows, positions // 16] * 16 + positions % 16).astype(np.int32),
        block_tables=tables.astype(np.int32),
        query_lens=lens,
        context_lens=before + lens,
        sample_indices=(np.cumsum(lens) - 1).astype(np.int32),
    )


def logits(folder, attention_rows):
    configure_device(DeviceConfig())
    backend = create_backend("cpu", "bfloat16")
    backend.attention_rows = attention_rows
    runner = ModelRunner(SPEC, folder, backend, 8, 16, 32, as_program=False)
    steps = step([PROMPT, 17], [0, 0]), step([DECODE, DECODE], [PROMPT, 17]), step([3, DECODE], [PROMPT + 1, 18])
    return [runner._forward(each).copy() for each in steps]


def test_token_rows_give_the_same_logits(tmp_path):
    write_model(tmp_path, SPEC)
    for own, planned in zip(logits(tmp_path, 0), logits(tmp_path, 8), strict=True):
        assert own.tobytes() == planned.tobytes()
