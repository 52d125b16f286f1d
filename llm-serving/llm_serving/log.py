"""Logging of both programs: one line an event, to standard error, named by process and module."""

import logging
import re
import sys
from typing import Final

ROOT: Final = "llm_serving"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
_UNSEEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What ends a line, steers a terminal or is half a character."""


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call it with `__name__`."""
    return logging.getLogger(name if name.startswith(ROOT) else f"{ROOT}.{name}")


class OneLine(logging.Formatter):
    """Whatever a client or a file has put into a text, its line is one line; a traceback follows it as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record))


def configure_logging(level: str = "INFO", process: str = "master") -> None:
    """Send the package's log lines to standard error; a second call replaces the first.

    Args:
        level: One of `LEVELS`.
        process: Shown in each line, such as "master" or "work_agent 0".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(f"%(asctime)s %(levelname)-7s [{process}] %(name)s: %(message)s"))
    logger = logging.getLogger(ROOT)
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
