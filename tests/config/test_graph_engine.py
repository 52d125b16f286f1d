"""Checks of `model_config.backend: ge`, and older files that use it."""

import pytest
from llm_serving.config import load_config
from llm_serving.errors import ConfigError

ASCEND = "device_config.device_target=Ascend"


@pytest.fixture
def given(tmp_path):
    (tmp_path / "decode.ini").write_text("")
    graphs = [f"model_config.mindir_path={tmp_path}", f"model_path.decode_ini=['{tmp_path}/decode.ini']"]
    return ["model_config.backend=ge", *graphs, ASCEND, "pa_config.num_blocks=300"]


def test_mindir_path_and_ini_are_found_for_exported_graphs(given, tmp_path):
    config = load_config(None, given)
    assert (config.model.mindir_path, config.model.mindir_ini) == (tmp_path, tmp_path / "decode.ini")
    assert config.notices == (
        "--set: model_config.backend: ge cannot copy KV blocks: requests with n, best_of or beams end with an error",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model_config.backend=kbk", "`model_config.mindir_path` must be left out with model_config.backend: kbk"),
        (
            "device_config.device_target=CPU",
            "`device_config.device_target` must be Ascend with model_config.backend: g",
        ),
        ("device_config.exactness=fast", "`device_config.exactness` must be exact with model_config.backend: ge: one"),
        ("scheduler_config.preemption_mode=swap", "`scheduler_config.preemption_mode` must be recompute with"),
        ("pa_config.num_swap_blocks=2", "`pa_config.num_swap_blocks` must be 0 with model_config.backend: ge: the KV"),
        ("pa_config.num_blocks=null", "`pa_config.num_blocks` must be given with model_config.backend: ge: the graph"),
        ("model_path.decode_ini=[a.ini, b.ini]", "`model_config.mindir_ini` must be a path or a list of one"),
        ("model_config.mindir_ini=no.ini", "no.ini does not exist"),
    ],
)
def test_settings_that_exported_graphs_do_not_support_are_refused(given, change, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, [*given, change])
    assert message in str(error.value)


def test_backend_ge_without_exported_graphs_is_served_as_kbk():
    config = load_config(None, ["model_config.backend=ge", "model_path.decode_ini=[910b_ge_inc.ini]"])
    assert config.model.mindir_ini is None
    assert config.notices == (
        "--set: model_config.backend: ge is served as kbk: model_config.mindir_path names no graphs of "
        "`llm-serving export`",
        "--set: model_config.mindir_ini: 910b_ge_inc.ini has no effect without model_config.mindir_path",
    )
