"""`llm-serving config import`: write the `config.json` of MindIE-Service as a serving YAML."""

from __future__ import annotations

import argparse

from llm_serving.cli.arguments import say
from llm_serving.errors import ConfigError

from llm_serving_tools.mindie import import_mindie


def run(arguments: argparse.Namespace) -> int:
    imported = import_mindie(arguments.source)
    for note in imported.notes:
        say(f"notice: {note}")
    text = imported.as_yaml(arguments.source.name)
    if arguments.output is None:
        print(text, end="", flush=True)
        return 0
    try:
        with arguments.output.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:  # for example, the disk is full
                arguments.output.unlink()
                raise
    except OSError as error:
        raise ConfigError(f"{arguments.output}: {error.strerror or error}") from None
    say(f"{arguments.output}: done")
    return 0
