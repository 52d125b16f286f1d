"""Without a compiler MindSpore's own operations are used, and the operator library is not loaded."""

import os
import subprocess
import sys

import pytest
from support.model_factories import tiny_spec, write_model

pytestmark = pytest.mark.mindspore

SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
from support.model_factories import random_weights, tiny_spec
from support.reference_llama import reference_logits
from support.step_factories import step_input
from llm_serving.config.sections.device import DeviceConfig
from llm_serving.log import configure_logging
from llm_serving.worker.device import backend_for, configure_device
from llm_serving.worker.model_runner import ModelRunner

configure_logging()
spec = tiny_spec(num_hidden_layers=1)
configure_device(DeviceConfig())
backend, _ = backend_for(DeviceConfig(), "bfloat16")
runner = ModelRunner(spec, Path(sys.argv[1]), backend, num_blocks=8, block_size=16, max_model_len=64)
text = list(range(3, 23))
for step in range(4):
    rows = [(text, 0, [5, 2])] if step == 0 else [(text[-1:], len(text) - 1, [5, 2])]
    text.append(int(runner.execute(step_input(rows, step=step)).token_ids[0]))
weights = random_weights(spec)
expected = [int(reference_logits(spec, weights, text[:length])[-1].argmax()) for length in range(20, 24)]
assert text[20:] == expected, (text[20:], expected)
assert "MS_OP_PLUGIN_PATH" not in os.environ
print(backend.name)
"""


def test_the_plain_backend_serves_with_a_notice(tmp_path):
    write_model(tmp_path / "model", tiny_spec(num_hidden_layers=1))
    environment = {name: value for name, value in os.environ.items() if name != "MS_OP_PLUGIN_PATH"}
    environment |= {
        "CXX": str(tmp_path / "no-compiler"),
        "LLM_SERVING_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["plain"]
    assert "MindSpore's own operations are used, many times slower" in done.stderr
    assert "no-compiler" in done.stderr
