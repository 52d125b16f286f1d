"""The command that compares exported graphs, without the graphs: its results file."""

import pytest
from families import exported

pytestmark = pytest.mark.mindspore


def test_interrupted_request_resumes_on_exported_graphs(tmp_path, monkeypatch):
    asked = []

    def check(name, folder, dtype, quantization):
        asked.append((name, dtype, quantization))
        if failing:
            raise RuntimeError("no memory")
        return ["states, step 1"] if dtype == "float16" and name == "qwen3" else []

    monkeypatch.setattr(exported, "check", check)
    options = ["--kinds", "bfloat16", "--done", str(tmp_path / "done.json")]
    failing = True
    assert exported.main(["llama3.1", "baichuan2-13b", *options]) == 1
    failing = False
    assert exported.main(["llama3.1", "baichuan2-13b", *options]) == 0
    assert asked == [("llama3.1", "bfloat16", None)] * 2, "a failure is asked again, a refusal has no graph"
    # Other tables of angles: the graph is that of llama3.1, which the file tells.
    assert exported.main(["llama3.1", "llama-linear", *options]) == 0
    assert len(asked) == 2
    assert exported.main(["qwen3", *options, "--kinds", "float16"]) == 1
    assert exported.main(["qwen3", *options, "--kinds", "float16"]) == 1
    assert len(asked) == 4, "bits that differ are asked again"
