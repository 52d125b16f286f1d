"""Runs the tests marked `plain` in a process in which MindSpore's own operators are not replaced."""

import subprocess

import pytest
from support.without_library import output_of

pytestmark = pytest.mark.mindspore

FILES = ("backends/test_operations.py", "models/test_llama.py", "families/test_networks.py")


def test_plain_kernels_are_right_without_the_operator_library(pytestconfig):
    files = [str(pytestconfig.rootpath / "tests" / each) for each in FILES]
    settings = ["-c", str(pytestconfig.inipath), "--rootdir", str(pytestconfig.rootpath), "-p", "no:cacheprovider"]
    try:
        output = output_of("pytest", "-q", "-m", "plain", *settings, *files)
    except subprocess.CalledProcessError as failure:
        pytest.fail(failure.stdout)
    assert " passed" in output
    assert "skipped" not in output
