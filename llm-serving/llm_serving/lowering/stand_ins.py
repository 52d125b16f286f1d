"""Stand-ins for packages that MindFormers imports, that its networks never call, and that are not installed.

`import mindformers` imports all of it: data sets, metrics, training. What those parts import from elsewhere is large
(`datasets`, `pyarrow`), or is at no package index (`hyper_parallel`, which runs its distributed training). While
`stand_ins` lasts, the import of a package named here that is missing gives an empty module; one that is installed is
imported as ever, and any other that is missing fails as ever.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

NEVER_CALLED: Final = frozenset(
    {"datasets", "hyper_parallel", "jieba", "mindpet", "pyarrow", "rouge_chinese", "tensorboardX"}
)
"""Of MindFormers 2.1: data sets and their files, metrics of training, parallel training, fine-tuning, its curves."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """While it lasts, packages of `NEVER_CALLED` that are missing can be imported. They stay in `sys.modules`."""
    finder = _Finder()
    sys.meta_path.append(finder)  # the last one asked: of packages that nobody else finds
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Absent:
    """Whatever is taken out of such a module: a decorator, a function that is called while modules are imported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _Absent:
        return self

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # By their names, classes: others inherit from them.
        return type(name, (_Absent,), {"__module__": self.__name__}) if name[0].isupper() else _Absent()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_named = fullname.partition(".")[0] in NEVER_CALLED
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_named else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
