"""`llm-serving config reference`: print a YAML with every key, its default and its meaning."""

from __future__ import annotations

import argparse

from llm_serving_tools.config_reference import reference_yaml


def run(arguments: argparse.Namespace) -> int:
    print(reference_yaml(), end="", flush=True)
    return 0
