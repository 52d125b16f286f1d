"""MindFormers' networks on the Ascend device of the stubs; skipped without MindFormers.

`scripts/acceptance.sh --mindformers` installs MindFormers and runs these tests.
"""

import importlib.util

import pytest
from ascend.arguments import ALL_RULES, MINDFORMERS_RULES, check
from ascend.kernels import kernels_of
from ascend.models import write_models
from ascend.processes import DECODES, PROMPT, Process, start

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mindformers") is None,
    reason="MindFormers is not installed: scripts/install_mindformers.sh",
)
EXPERTS = "qwen3, experts"
FAMILIES = ("demo", "qwen3", "glm4", EXPERTS, "glm4-moe", "deepseek-v3-wide")
"""A model for each class of MindFormers; the demo model is a Llama."""
NOT_OF_A_LIBRARY = {"ExpandDims", "Range", "ReshapeExt", "ScalarMul", "Shape", "StridedSlice"}
"""Operations of the mask and of MindFormers' own code that CANN compiles or the CPU computes."""


@pytest.fixture(scope="module")
def ended(cann, tmp_path_factory):
    """Process that loads each model by MindFormers and runs a decode step and a prompt."""
    models = write_models(tmp_path_factory.mktemp("models"), FAMILIES[1:])
    implementations = dict.fromkeys(FAMILIES, "mindformers") | {"legacy": "mindformers-legacy"}
    steps = DECODES[0], PROMPT
    jobs = [
        {"name": name, "folder": name if name in models else "demo", "steps": steps, "implementation": implementation}
        for name, implementation in implementations.items()
    ]
    process = Process(jobs, {"processors": 16})
    return start({"mindformers": process}, cann, models, tmp_path_factory.mktemp("run"))["mindformers"]


def test_classes_of_mindformers_start_on_ascend(ended):
    assert ended.returncode == 0, ended.output[-3000:]
    assert set(ended.jobs) == {*FAMILIES, "legacy"}


@pytest.mark.parametrize("name", [*FAMILIES, "legacy"])
def test_calls_of_mindformers_satisfy_the_rules_of_cann(ended, name):
    for call in set(ended.jobs[name].calls):
        check(call)
        assert not call.endswith("without an executor")


def test_every_operator_that_mindformers_calls_has_a_rule(ended):
    called = {call.split()[0] for job in ended.jobs.values() for call in job.calls} - {"aclop"}
    assert called <= set(ALL_RULES)
    assert set(MINDFORMERS_RULES) <= called


@pytest.mark.parametrize("name", [*FAMILIES, "legacy"])
def test_kernels_and_copies_of_mindformers_on_ascend(ended, name):
    job = ended.jobs[name]
    kernels = kernels_of(job, job.other_graphs)
    assert kernels["PagedAttention"] == "ATB"
    assert kernels["ReshapeAndCache"] == "internal"
    assert {node for node, kernel in kernels.items() if kernel in ("CPU", "TBE")} <= NOT_OF_A_LIBRARY
    for step in job.found["steps"]:
        assert {(run["to_host"], run["synchronisations"]) for run in step.values()} == {(1, 1)}
