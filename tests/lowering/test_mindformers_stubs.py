"""Packages that MindFormers imports and its networks never call."""

import importlib
import sys

import pytest
from llm_serving.lowering.mindformers import NEVER_CALLED, import_stubs


@pytest.fixture(autouse=True)
def modules_as_before():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_import_stubs_provide_missing_packages():
    assert "hyper_parallel" in NEVER_CALLED
    with import_stubs():
        module = importlib.import_module("hyper_parallel.core.dtensor")

    class Derived(module.Layout):
        pass

    @module.decorator(1)
    def decorated():
        pass

    assert isinstance(Derived(3).of.anything(), Derived)
    with pytest.raises(AttributeError):
        _ = module.__version__


def test_import_stubs_provide_no_other_package():
    with import_stubs(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package")


def test_import_stubs_keep_installed_packages(tmp_path, monkeypatch):
    (tmp_path / "jieba.py").write_text("words = 3")
    monkeypatch.syspath_prepend(tmp_path)
    with import_stubs():
        assert importlib.import_module("jieba").words == 3


def test_import_stubs_end_with_their_context():
    finders = list(sys.meta_path)
    with import_stubs():
        assert len(sys.meta_path) == len(finders) + 1
    assert sys.meta_path == finders
