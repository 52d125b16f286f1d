"""The kernel of each operation and the copies of each step, in `kernels.json`.

After an intended change, write the table with `PYTHONPATH=tests python -m ascend.kernels`, and give the reason in
the commit.
"""

import re
from collections import defaultdict
from pathlib import Path

import pytest
from ascend.kernels import PARTS, read_table, rows_of
from ascend.processes import NUM_AHEAD, PROCESSES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "ascend.md"
LIBRARIES = {"ATB": "ATB", "MindSpore's kernels for Ascend": "internal", "CANN (aclnn)": "aclnn"}
"""As the document names them -> as `kernels.json` does."""
IN_TABLE = tuple(name for name, process in PROCESSES.items() if process.in_table)


@pytest.mark.parametrize("name", IN_TABLE)
def test_kernels_and_copies_equal_the_committed_table(ended, name):
    table = read_table()
    for model, row in rows_of(name, ended(name)).items():
        expected = table[model]
        for part in ("settings", *PARTS, "steps"):
            assert row[part] == expected[part], f"{part} of {model}"


def test_decode_step_uses_no_cpu_or_cann_compiled_kernel():
    for model, row in read_table().items():
        used = {*row["kernels"].values(), *row["drawing kernels"].values()}
        assert not {"CPU", "TBE"} & used, model


def test_document_names_the_library_of_each_operation_of_the_decode_graph():
    documented = {}
    for library, *cells in (line[2:].split(" | ") for line in DOCUMENT.read_text().splitlines()):
        if library in LIBRARIES:
            documented[LIBRARIES[library]] = set(re.findall("`([A-Z]\\w+)`", cells[0]))
    used = defaultdict(set)
    for row in read_table().values():
        for operation, kernel in row["kernels"].items():
            used["aclnn" if kernel.startswith("aclnn") else kernel].add(operation)
    del used["runtime"]  # operations without a kernel
    assert used == documented


def is_decode(step):
    return step["rows"] == step["tokens"]


def num_copies(model):
    """Copies to the device of a decode step that is repeated unchanged: what it computes, and the lengths of contexts.
    In exact mode there are also the numbers of tokens of all rows, some of which have none.
    """
    return 3 if "exact" in model else 2


def test_decode_step_has_the_minimum_of_copies():
    for model, row in read_table().items():
        for step in filter(is_decode, row["steps"]):
            copies = step["to_device"], step["to_host"], step["on_device"], step["synchronisations"]
            assert copies == (num_copies(model), 1, 0, 1), (model, step)
            assert (step["pinned_to_device"], step["pinned_to_host"]) == copies[:2], (model, step)
            if step["sampling"] != "sampled":
                assert step["bytes_to_host"] == 8 * step["rows"], (model, step)


def test_kernel_table_has_exactly_the_tested_models():
    assert set(read_table()) == {f"{job['name']} ({name})" for name in IN_TABLE for job in PROCESSES[name].jobs}


@pytest.mark.parametrize(("name", "kind"), [("exact", "greedy"), ("exact", "limited"), ("families", "greedy")])
def test_a_step_is_started_before_the_tokens_of_the_last_one_are_awaited(ended, name, kind):
    ahead = ended(name).jobs["demo"].ahead(kind)
    order = ["start 0"]
    for step in range(1, NUM_AHEAD):
        order += [f"start {step}", f"await {step - 1}"]
    assert [what for what, _ in ahead] == order
    for what, events in ahead:
        if what.startswith("start"):
            assert events[-1] == "copy to the host", (what, events)
            copies = events[:-1]
            assert set(copies) == {"copy to the device"}, (what, events)
            # One copy more than in the table: the plan of PagedAttention for a longer context.
            assert what == "start 0" or len(copies) == num_copies(name) + 1, (what, events)
        else:
            assert events == ["wait for event"], (what, events)


def test_device_whose_tokens_differ_from_the_sampler_draws_none(ended):
    assert not ended("exact").jobs["demo"].found["draws_after_check"]
