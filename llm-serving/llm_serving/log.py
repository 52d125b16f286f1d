"""Logging of both programs: one line an event, to standard error, named by process and module."""

import logging
import sys
from typing import Final

ROOT: Final = "llm_serving"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call it with `__name__`."""
    return logging.getLogger(name if name.startswith(ROOT) else f"{ROOT}.{name}")


def configure_logging(level: str = "INFO", process: str = "master") -> None:
    """Send the package's log lines to standard error; a second call replaces the first.

    Args:
        level: One of `LEVELS`.
        process: Shown in each line, such as "master" or "work_agent 0".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s [{process}] %(name)s: %(message)s"))
    logger = logging.getLogger(ROOT)
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
