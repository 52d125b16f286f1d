"""What a configuration may choose by name and another room implements.

Exit codes of WorkAgents: what one that came to no conversation with its master can still say, wherever it ran.
"""

from __future__ import annotations

import enum
from enum import IntEnum


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


class RoutingName(enum.StrEnum):
    """Which of several replicas gets a request: `engine.routing`."""

    PREDICTED_TTFT = "predicted_ttft"
    PREFIX_AFFINITY = "prefix_affinity"
    BLOCK_COST = "block_cost"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class RoleName(enum.StrEnum):
    """What a replica computes of requests: `engine.router`."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineName(enum.StrEnum):
    """Who starts WorkAgents: `executor.placement`."""

    LOCAL = "local"
    RAY = "ray"


class WeightsName(enum.StrEnum):
    """Where the machines of a cluster have a model's weights from."""

    PATH = "path"
    OBJECT_STORE = "object_store"


class SpreadName(enum.StrEnum):
    """How WorkAgents are put on the machines of a cluster."""

    SPREAD = "spread"
    PACK = "pack"


class QuantizationName(enum.StrEnum):
    """In how many bits weights and the rows they multiply are kept: `network.coded`."""

    W8A8 = "w8a8"
    W8A16 = "w8a16"
    W4A16 = "w4a16"
    W4A8 = "w4a8"


class KVCacheDtypeName(enum.StrEnum):
    """How keys and values are kept: `worker.kv_tensors`."""

    AUTO = "auto"
    INT8 = "int8"


class ExactnessName(enum.StrEnum):
    """Whether speed may cost the last bits of an answer: `worker.exactness` tells what each promises."""

    EXACT = "exact"
    FAST = "fast"


class ImplementationName(enum.StrEnum):
    """Whose network a model is computed by: `lowering.lower`."""

    NATIVE = "native"
    MINDFORMERS = "mindformers"
    MINDFORMERS_LEGACY = "mindformers-legacy"


class JsonWhitespaceName(enum.StrEnum):
    """What may stand between the parts of JSON that an answer is bound to: `text.constraints.grammars`."""

    NONE = "none"
    SPACE = "space"
    LINES = "lines"


class ToolFormatName(enum.StrEnum):
    """How a model writes calls of tools: `text.tools`."""

    MISTRAL = "mistral"
    GLM = "glm"
    HERMES = "hermes"
    LLAMA = "llama"
    GLM_LINES = "glm_lines"


class SpeculativeMethodName(enum.StrEnum):
    """Method of speculative decoding: `speculation`."""

    NONE = "none"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"


class Proposer(enum.StrEnum):
    """What proposes draft tokens."""

    NGRAM = "ngram"
    """The tokens that followed the same n-gram earlier."""
    DRAFT_MODEL = "draft_model"
    """A small model."""
    FORCED = "forced"
    """A constraint that leaves no choice."""


class AgentExit(IntEnum):
    """As a process ends with it; a signal is the negative of its number."""

    ENDED = 0
    """Its master told it to, or is gone."""
    BROKEN = 1
    """The channel, in the middle of a frame."""
    NO_SECRET = 3
    UNREACHABLE = 4
    RANK_LOST = 5


_SAID = {
    AgentExit.NO_SECRET: "its machine has another cluster_config.secret_file than the master, or none that can be used",
    AgentExit.UNREACHABLE: "it did not reach the master at cluster_config.master_host",
    AgentExit.RANK_LOST: "another rank of its replica is gone, or does something else",
}


def describe_exit(code: int | None) -> str:
    """As in "code 4: it did not reach ..."."""
    said = next((f": {text}" for known, text in _SAID.items() if known == code), "")
    return f"code {code}{said}"
