"""Modules of the packages that stand beside this one, import it, and may be missing: simulator and receipts."""

from __future__ import annotations

import importlib
from types import ModuleType

from llm_serving.errors import ConfigError


def import_optional(module: str, user: str, remedy: str = "") -> ModuleType:
    """Import a module of a package that may not be installed.

    Args:
        module: With its package, "llm_serving_receipts.issuer".
        user: The command or key that needs it, for the error.
        remedy: What to do about it, for the end of the error.

    Raises:
        ConfigError: The package is not installed. A module that the package itself lacks raises ModuleNotFoundError.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigError(f"`{user}` needs the package {package}, which is not installed{remedy}") from None
