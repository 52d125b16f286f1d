"""Exported graphs computed by mindspore_lite."""

import sys

import numpy as np
import pytest
from llm_serving.backends.ascend import AscendBackend
from llm_serving.backends.cpu import CpuColumns
from llm_serving.cli.main import main
from llm_serving.config import load_config
from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.errors import ConfigError, KernelError, WorkerError
from llm_serving.executor.supervisor import load_settings
from llm_serving.lowering.mindir import check_graph_settings
from llm_serving.worker import loading
from llm_serving.worker.exactness import guarantee
from llm_serving.worker.kv_cache import GraphOwnedCache
from llm_serving.worker.loading import load_runner
from llm_serving.worker.model_runner import ModelRunner
from mindspore.train import serialization
from support.fake_mindspore_lite import fake_package
from support.graph_model import backend
from support.small_model import write_small_model
from support.step_factories import step_input

pytestmark = pytest.mark.mindspore

NUM_BLOCKS, LENGTH = 16, 128
SIZES = (f"pa_config.num_blocks={NUM_BLOCKS}", f"model_config.max_generate_length={LENGTH}")
PROMPTS = [(list(range(3, 43)), 0, [3, 9, 1]), ([7, 8, 9], 0, [5])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return (model folder, folder of its graphs, options)."""
    backend("cpu", "bfloat16")  # registers the operator library before the first operator
    top = tmp_path_factory.mktemp("ge")
    write_small_model(top / "model", num_attention_heads=2, num_key_value_heads=1)
    sizes = [argument for each in SIZES for argument in ("--set", each)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialization, "TOTAL_SAVE", 64)  # KiB, so that one graph is split like large ones
        assert main(["export", str(top / "graphs"), "--model", str(top / "model"), *sizes]) == 0
    assert {each.name for each in (top / "graphs").glob("*.mindir")} == {"states_graph.mindir", "head.mindir"}
    (top / "decode.ini").write_text("[ascend_context]\nplugin_custom_ops=All\n")
    return top / "model", top / "graphs", top / "decode.ini"


def settings_of(folders, *changes):
    model, graphs, ini = folders
    given = ["model_config.backend=ge", f"model_config.mindir_path={graphs}", f"model_path.decode_ini=['{ini}']"]
    config = load_config(None, [*SIZES, *given, "device_config.device_target=Ascend", *changes], model)
    return load_settings(config, 0)


@pytest.fixture
def lite(monkeypatch):
    package = fake_package()
    monkeypatch.setitem(sys.modules, "mindspore_lite", package)
    monkeypatch.setattr(loading, "configure_device", lambda *given: pytest.fail("it selects a device for MindSpore"))
    return package


def steps():
    """Return steps: prompts, then a decode row with a prompt chunk."""
    yield step_input(PROMPTS, step=0)
    yield step_input([([44], 40, [3, 9, 1]), ([10, 11], 3, [5])], step=1)


def test_exported_graph_gives_the_tokens_of_the_compiled_one(folders, lite, monkeypatch):
    monkeypatch.setattr(AscendBackend, "columns", CpuColumns)
    runner, notice = load_runner(settings_of(folders, "serving_config.start_device_id=3"), lambda text: None)
    assert (notice, runner.compute_fingerprint.kernels) == (guarantee("exact", "ascend"), "ge")
    options = {"ascend_context": {"plugin_custom_ops": "All"}}
    assert [(each.name, each.device_id, each.rank_id, each.options) for each in lite.Model.built] == [
        ("states_graph.mindir", 3, 0, options),
        ("head.mindir", 3, 0, options),
    ]
    served = ModelRunner(
        runner.spec, folders[0], backend("ascend", "bfloat16"), NUM_BLOCKS, 16, LENGTH, as_program=False
    )
    served.warm_up()
    for step in steps():
        found, expected = runner.execute(step), served.execute(step)
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert not found.row_errors


def test_block_moves_are_rejected_with_an_exported_graph():
    caches = GraphOwnedCache(backend("ascend", "bfloat16"), (), (), NUM_BLOCKS, 0, 16)
    caches.move_blocks(np.zeros((0, 6), np.int32))
    move = BlockMove(BlockMoveKind.COPY, 3, 1, 5, 1, 16)
    with pytest.raises(WorkerError, match="a graph, which cannot copy blocks: n, best_of and beams"):
        caches.move_blocks(np.array([move], np.int32))


def test_graphs_of_another_model_are_rejected(folders, lite):
    with pytest.raises(ConfigError, match=r"mindir.json has num_blocks 16, but the configuration has 17; "):
        load_runner(settings_of(folders, "pa_config.num_blocks=17"), lambda text: None)
    with pytest.raises(ConfigError, match=r"must be a folder of `llm-serving export`; it lacks mindir.json"):
        load_runner(settings_of(folders, f"model_config.mindir_path={folders[0]}"), lambda text: None)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_damaged_settings_of_graphs_are_rejected(tmp_path, content):
    for name in ("mindir.json", "states.mindir", "head.mindir"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"mindir\.json: (cannot be read|must be a JSON object)"):
        check_graph_settings(tmp_path, {"num_blocks": 16})


def test_a_graph_with_other_arguments_is_rejected(folders, lite, monkeypatch):
    monkeypatch.setattr(lite.Model, "get_inputs", lambda model: model._inputs[:2])
    found = "Found: token_ids int32 of 1, positions int32 of 1$"
    with pytest.raises(
        ConfigError, match=f"states_graph.mindir must have the arguments token_ids int32 of 1, .*{found}"
    ):
        load_runner(settings_of(folders), lambda text: None)


def test_a_missing_mindspore_lite_is_named(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "mindspore_lite", None)
    with pytest.raises(KernelError, match="backend: ge needs mindspore_lite, which is not installed"):
        load_runner(settings_of(folders), lambda text: None)
