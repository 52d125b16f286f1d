"""The environment variables that a WorkAgent sets before it imports MindSpore."""

import subprocess
import sys

import pytest
from llm_serving.core.mindspore_environment import set_mindspore_environment

VARIABLE = "MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "FlashAttentionScore,PagedAttention"),
        ("", "FlashAttentionScore,PagedAttention"),
        ("PagedAttention", "PagedAttention,FlashAttentionScore"),
        (" MatMul , ", "MatMul,FlashAttentionScore,PagedAttention"),
        ("FlashAttentionScore,PagedAttention", "FlashAttentionScore,PagedAttention"),
    ],
)
def test_attention_kernels_join_what_the_operator_disabled(given, expected):
    environment = {} if given is None else {VARIABLE: given}
    set_mindspore_environment(environment)
    assert environment[VARIABLE] == expected


def test_log_levels_of_the_operator_stay():
    environment = {"MS_SUBMODULE_LOG_v": "{ANALYZER:0}"}
    set_mindspore_environment(environment)
    assert environment["MS_SUBMODULE_LOG_v"] == "{ANALYZER:0}"


def test_work_agent_sets_them_before_it_imports_mindspore():
    """An importer that stands in front of all others looks at the variable when MindSpore is asked for."""
    program = f"""
import os, runpy, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mindspore":
            print(os.environ.get({VARIABLE!r}))
            os._exit(0)
sys.meta_path.insert(0, Watch())
sys.argv = ["work_agent"]
runpy.run_module("llm_serving.work_agent", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.strip() == "FlashAttentionScore,PagedAttention", ended.stderr
