"""The server's start-up through MindSpore's own Ascend plugin, on stubs of CANN."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ascend.cann_stubs import build, reason_not_to_build
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.models.spec import ModelSpec
from support.model_factories import write_model

if (reason := reason_not_to_build()) is not None:
    pytest.skip(reason, allow_module_level=True)

SCRIPT = Path(__file__).parent / "start_up.py"
START_UP_S = 120


@pytest.fixture(scope="module")
def cann(tmp_path_factory):
    """Environment variables of a process that finds the stubs."""
    return build(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of the shipped model with one layer: all are alike, and MindSpore compiles each for more than a second."""
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((DEMO_FOLDER / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    write_model(folder, ModelSpec.from_folder(folder))
    return folder


def start_up(cann, folder, *arguments, processors=32, gigabytes=64):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MS_", "ASCEND_"))}
    environment = own | cann | {"FAKE_PROCESSORS": str(processors), "FAKE_HBM_GB": str(gigabytes)}
    command = [sys.executable, str(SCRIPT), str(folder), *arguments]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_UP_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("processors", "gigabytes", "arguments", "backend"),
    [
        (4, 64, (), "ascend"),
        (8, 32, ("--dtype", "bfloat16", "--max-device-memory", str(58 * 2**30)), "ascend"),
        (16, 32, ("--exactness", "fast"), "ascend_fast"),
        (64, 64, ("--dtype", "bfloat16", "--exactness", "fast", "--block-size", "128"), "ascend_fast"),
    ],
)
def test_start_up_passes_on_any_number_of_processors(cann, folder, processors, gigabytes, arguments, backend):
    ended = start_up(cann, folder, *arguments, processors=processors, gigabytes=gigabytes)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["backend"] == backend
    # CANN keeps 3 GB of the stub for itself, MindSpore takes less than 1 GB before the model.
    assert gigabytes - 4 < found["free"] / 2**30 <= gigabytes - 3
    assert found["cache"] > 5 * 10**7 > found["held"], "the host holds the cache, too"
    assert ("the same bytes are not promised" in found["notice"]) == (backend == "ascend")


@pytest.mark.parametrize(
    ("arguments", "processors", "error"),
    [
        (("--without-environment",), 32, "Tiling error for PagedAttention"),
        (("--swiglu",), 32, "The pointer[value_str] is null"),
        (("--without-threads",), 8, "PagedAttention"),
    ],
)
def test_start_up_fails_without_what_the_device_asks_for(cann, folder, arguments, processors, error):
    ended = start_up(cann, folder, *arguments, processors=processors)
    assert ended.returncode != 0
    assert error in ended.stderr + ended.stdout
