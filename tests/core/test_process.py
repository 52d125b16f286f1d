"""Subprocesses import nothing from the working directory, end with their parent, and set up MindSpore's environment."""

import subprocess
import sys
from pathlib import Path

import llm_serving
import psutil
import pytest
from llm_serving.core.process import command_of, set_mindspore_environment

VARIABLE = "MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"


def test_module_command_ignores_modules_in_the_working_directory(tmp_path):
    for name in ("logging.py", "signal.py", "yaml.py"):
        (tmp_path / name).write_text("raise SystemExit('this is not what was meant')\n")
    log = tmp_path / "server.log"
    log.touch()
    command = command_of("llm_serving_tools.log_keeper", str(log), "1048576", "2")
    subprocess.run(command, cwd=tmp_path, input=b"a line\n", check=True, timeout=60)
    assert log.read_text() == "a line\n"


def test_only_core_process_uses_sys_executable():
    package = Path(llm_serving.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if "sys.executable" in path.read_text()] == [
        str(package / "core" / "process.py")
    ]


def test_hanging_subprocess_ends_with_its_parent():
    """The process holds Python's lock in one call, so none of its threads could notice the end of the parent."""
    child = "import ctypes, os; from llm_serving.core.process import die_with_parent; die_with_parent()"
    child += "; print(os.getpid(), flush=True); ctypes.PyDLL(None).pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        hanging = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert not psutil.wait_procs([hanging], timeout=60)[1]


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
def test_attention_kernels_are_added_to_the_disabled_kernels_of_the_operator(given, expected):
    environment = {} if given is None else {VARIABLE: given}
    set_mindspore_environment(environment)
    assert environment[VARIABLE] == expected


def test_collectives_use_hccl_unless_the_operator_chose_others():
    environment = {"HCCL_OP_EXPANSION_MODE": "AI_CPU"}
    set_mindspore_environment(environment)
    assert environment["MS_ENABLE_LCCL"] == "off"
    assert environment["HCCL_OP_EXPANSION_MODE"] == "AI_CPU"


def test_log_levels_of_the_operator_are_kept():
    environment = {"MS_SUBMODULE_LOG_v": "{ANALYZER:0}"}
    set_mindspore_environment(environment)
    assert environment["MS_SUBMODULE_LOG_v"] == "{ANALYZER:0}"


def test_work_agent_sets_the_environment_before_it_imports_mindspore():
    """The first importer reads the variable when MindSpore is imported."""
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
