"""Modules of MindFormers, imported without what its networks never call, and without its log files."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import os
import tempfile
from typing import Any, Final

from mindspore import nn

from llm_serving.errors import KernelError
from llm_serving.lowering.stand_ins import stand_ins

INSTALL: Final = "scripts/install_mindformers.sh"
_PACKAGE: Final = "mindformers"


def mindformers_version() -> str:
    """Of the package that is installed.

    Raises:
        KernelError: It cannot be imported.
    """
    return str(module_of_mindformers(_PACKAGE).__version__)


@functools.cache
def module_of_mindformers(module: str) -> Any:
    """A module of MindFormers.

    Raises:
        KernelError: It, or a package that it needs, is not installed.
    """
    try:
        with stand_ins():
            if module != _PACKAGE:
                module_of_mindformers(_PACKAGE)
                return importlib.import_module(module)
            with tempfile.TemporaryDirectory(prefix="mindformers_log_") as folder:
                os.environ.setdefault("RUN_MODE", "predict")
                os.environ.setdefault("LOG_MF_PATH", folder)
                package = importlib.import_module(module)
                _quieten(importlib.import_module("mindformers.tools.logger").get_logger())
            return package
    except ImportError as error:
        raise KernelError(
            f"model_config.implementation: mindformers needs MindFormers 2.1 and what it imports, and {INSTALL} "
            f"installs them: {error}"
        ) from None


def _quieten(mindformers_logger: logging.Logger) -> None:
    """It writes files of its own, and every layer that it builds, to the standard output."""
    mindformers_logger.setLevel(logging.WARNING)
    for handler in list(mindformers_logger.handlers):
        if isinstance(handler, logging.FileHandler):
            mindformers_logger.removeHandler(handler)
            handler.close()


def silently() -> contextlib.redirect_stdout[io.StringIO]:
    """While it builds a network MindFormers prints a table of all that its configuration says."""
    return contextlib.redirect_stdout(io.StringIO())


def put(network: nn.Cell, place: str, value: Any) -> None:
    """Sets an attribute of a Cell within another, `layers.0.attention.weight`."""
    *path, attribute = place.split(".")
    cell: Any = network
    for name in path:
        cell = cell[int(name)] if name.isdecimal() else getattr(cell, name)
    setattr(cell, attribute, value)
