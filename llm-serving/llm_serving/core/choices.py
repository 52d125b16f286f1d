"""What a configuration may choose by name and another room implements."""

from __future__ import annotations

import enum


class PolicyName(enum.StrEnum):
    """What a step begins with: `scheduler.policy`."""

    PREFILL_FIRST = "prefill_first"
    DECODE_FIRST = "decode_first"
    MIXED = "mixed"
    THROUGHPUT = "throughput"
    FCFS = "fcfs"


class OrderName(enum.StrEnum):
    """Who of a class goes next: `scheduler.orders`."""

    FAIR = "fair"
    ARRIVAL = "arrival"
    SHORTEST = "shortest"
    DEADLINE = "deadline"


class ToolFormatName(enum.StrEnum):
    """How a model writes calls of tools: `text.tools`."""

    MISTRAL = "mistral"
    GLM = "glm"
    HERMES = "hermes"
    LLAMA = "llama"
    GLM_LINES = "glm_lines"
