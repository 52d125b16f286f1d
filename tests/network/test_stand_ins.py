"""Packages that MindFormers imports and its networks never call."""

import importlib
import sys

import pytest
from llm_serving.lowering.mindformers import NEVER_CALLED, stand_ins


@pytest.fixture(autouse=True)
def modules_as_before():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_named_package_that_is_missing_is_an_empty_module():
    assert "hyper_parallel" in NEVER_CALLED
    with stand_ins():
        module = importlib.import_module("hyper_parallel.core.dtensor")

    class Derived(module.Layout):
        pass

    @module.decorator(1)
    def decorated():
        pass

    assert isinstance(Derived(3).of.anything(), Derived)
    with pytest.raises(AttributeError):
        _ = module.__version__


def test_no_other_package_is_made_up():
    with stand_ins(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package")


def test_a_package_that_is_installed_is_itself(tmp_path, monkeypatch):
    (tmp_path / "jieba.py").write_text("words = 3")
    monkeypatch.syspath_prepend(tmp_path)
    with stand_ins():
        assert importlib.import_module("jieba").words == 3


def test_it_lasts_no_longer_than_asked_for():
    finders = list(sys.meta_path)
    with stand_ins():
        assert len(sys.meta_path) == len(finders) + 1
    assert sys.meta_path == finders
