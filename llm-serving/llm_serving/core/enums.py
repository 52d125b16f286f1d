"""Enumerations of configuration values, and exit codes of WorkAgents."""

from __future__ import annotations

import enum
from enum import IntEnum


class PolicyName(enum.StrEnum):
    """Scheduling policy: whether a step begins with prefill or decode. See `scheduler.policies`."""

    PREFILL_FIRST = "prefill_first"
    DECODE_FIRST = "decode_first"
    MIXED = "mixed"
    THROUGHPUT = "throughput"
    FCFS = "fcfs"


class OrderName(enum.StrEnum):
    """Order of requests within a class; see `scheduler.policies`."""

    FAIR = "fair"
    ARRIVAL = "arrival"
    SHORTEST = "shortest"
    DEADLINE = "deadline"


class RoutingName(enum.StrEnum):
    PREDICTED_TTFT = "predicted_ttft"
    PREFIX_AFFINITY = "prefix_affinity"
    BLOCK_COST = "block_cost"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


class RoleName(enum.StrEnum):
    """Role of a replica in prefill/decode disaggregation; see `engine.fleet.router`."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineName(enum.StrEnum):
    """Launcher of WorkAgents: this server itself, or Ray (`executor.placement`)."""

    LOCAL = "local"
    RAY = "ray"


class WeightsName(enum.StrEnum):
    """How the machines of a cluster get the weights: from a local path, or from Ray's object store."""

    PATH = "path"
    OBJECT_STORE = "object_store"


class SpreadName(enum.StrEnum):
    SPREAD = "spread"
    PACK = "pack"


class QuantizationName(enum.StrEnum):
    """`wNaM`: weights of N bits, activations of M bits. `blocks_a16`: weights in the blocks of a GGUF file."""

    W8A8 = "w8a8"
    W8A16 = "w8a16"
    W4A16 = "w4a16"
    W4A8 = "w4a8"
    BLOCKS_A16 = "blocks_a16"
    DEQUANTIZED = "dequantized"


class PoolingMode(enum.StrEnum):
    """How an embedding is computed from the last layer's hidden states of a prompt."""

    LAST = "last"
    FIRST = "cls"
    MEAN = "mean"
    """The mean over all tokens. One step must compute the whole prompt."""


class KVCacheDtypeName(enum.StrEnum):
    AUTO = "auto"
    INT8 = "int8"


class ExactnessName(enum.StrEnum):
    """Whether the bits of an answer may depend on the batch; see `worker.device`."""

    EXACT = "exact"
    FAST = "fast"


class ImplementationName(enum.StrEnum):
    """Implementation of a model's network; see `lowering.lower`."""

    NATIVE = "native"
    MINDFORMERS = "mindformers"
    MINDFORMERS_LEGACY = "mindformers-legacy"


class SpecialTokensName(enum.StrEnum):
    """Whether special tokens in message contents are text or control tokens; see `text.tokenizer.typed_text`."""

    TEXT = "text"
    CONTROL = "control"


class JsonWhitespaceName(enum.StrEnum):
    """White space in JSON answers with a schema; see `text.structured_output.grammars`."""

    NONE = "none"
    SPACE = "space"
    LINES = "lines"


class ToolFormatName(enum.StrEnum):
    HARMONY = "harmony"
    KIMI = "kimi"
    DEEPSEEK_FENCED = "deepseek_fenced"
    DEEPSEEK = "deepseek"
    DEEPSEEK_DSML = "deepseek_dsml"
    MISTRAL = "mistral"
    MINIMAX = "minimax"
    SEED = "seed"
    QWEN_XML = "qwen_xml"
    COHERE = "cohere"
    GRANITE = "granite"
    GEMMA = "gemma"
    HUNYUAN = "hunyuan"
    NEMOTRON = "nemotron"
    MINICPM = "minicpm"
    LFM2 = "lfm2"
    OLMO = "olmo"
    GLM = "glm"
    HERMES = "hermes"
    LLAMA = "llama"
    GLM_LINES = "glm_lines"


class ReasoningFormatName(enum.StrEnum):
    HARMONY = "harmony"
    SEED = "seed"
    COHERE = "cohere"
    MISTRAL = "mistral"
    GRANITE = "granite"
    GEMMA = "gemma"
    MINICPM = "minicpm"
    THINK_RESPONSE = "think_response"
    THINK_ANSWER = "think_answer"
    THINK = "think"


class SpeculativeMethodName(enum.StrEnum):
    NONE = "none"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"
    MTP = "mtp"


class Proposer(enum.StrEnum):
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"
    MTP = "mtp"
    FORCED = "forced"
    """Tokens that the constraint forces, because it allows no others."""


class AgentExit(IntEnum):
    """Exit code of a WorkAgent. After a signal, the code is the negative signal number."""

    ENDED = 0
    BROKEN = 1
    """The connection to the master broke in the middle of a frame."""
    NO_SECRET = 3
    UNREACHABLE = 4
    RANK_LOST = 5


_EXIT_CODE_MEANINGS = {
    AgentExit.NO_SECRET: "its machine has no usable cluster_config.secret_file, or one that differs from the master's",
    AgentExit.UNREACHABLE: "it did not reach the master at cluster_config.master_host",
    AgentExit.RANK_LOST: "another rank of its replica has exited, or sent an unexpected message",
}


def describe_exit(code: int | None) -> str:
    meaning = next((f": {text}" for known, text in _EXIT_CODE_MEANINGS.items() if known == code), "")
    return f"code {code}{meaning}"
