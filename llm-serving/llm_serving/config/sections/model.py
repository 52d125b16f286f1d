"""Section `model_config`: its keys, and their checks against each other and the model's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from llm_serving.config.legacy import MindFormersFile
from llm_serving.config.paths import Kind
from llm_serving.config.rules import (
    BOOLEAN,
    MODEL_NAME,
    MODEL_NAMES,
    REVISION,
    SECONDS,
    choice,
    integer,
    integers,
    largest,
    option,
    path,
    path_or_first,
)
from llm_serving.config.sections.device import ASCEND_DTYPES, KERNELS, groups_layers
from llm_serving.config.values import Values
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.enums import ExactnessName, ImplementationName, KVCacheDtypeName
from llm_serving.core.window import CacheGroups
from llm_serving.errors import ConfigError
from llm_serving.hub import HUBS
from llm_serving.models.gguf import is_gguf
from llm_serving.models.mindformers import unsupported_by_mindformers, unsupported_by_mindformers_llama
from llm_serving.models.spec import ContextLengths, ModelSpec, context_lengths
from llm_serving.network.rope import Scaling

BATCHING_STRATEGIES: Final = ("continuous", "static")
_DTYPE_ALIASES: Final = {alias: dtype.name for dtype in MODEL_DTYPES.values() for alias in dtype.aliases}
DEFAULT_MAX_GENERATE_LENGTH: Final = 4096
CLIENT_MODEL_NAMES: Final = ("llama2", "internlm", "tgi", "dummy")
"""Names in the older servers' routes, and names that text-generation's and huggingface_hub's clients send."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section `model_config`: the model, its lengths and its batch sizes."""

    model_name: str = option("model", MODEL_NAME, derived=True)
    """Name of the model in the HTTP routes and in responses. null: the name of the model's folder."""
    model_aliases: tuple[str, ...] = option(CLIENT_MODEL_NAMES, MODEL_NAMES)
    """Other names by which clients may request the model; responses contain `model_name`. `*`: any name. Default: names
    that clients of the older servers, and common clients, send. A request for another name gets 404."""
    model_path: Path | None = option(None, path(Kind.FILE_OR_FOLDER))
    """Folder of the model in Hugging Face form (config.json, *.safetensors, tokenizer), or a GGUF file. The word `demo`
    means the shipped model. Where no such folder exists: the name of a model on a hub, such as Qwen/Qwen3-0.6B."""
    model_hub: str = option("auto", choice(("auto", *HUBS)))
    """Hub of a model that `model_path` names. `auto`: the local caches of both hubs, then Hugging Face."""
    model_revision: str | None = option(None, REVISION)
    """Branch, tag or commit of a model that `model_path` names. null: the hub's main branch."""
    tokenizer_path: Path | None = option(None, path(Kind.FILE_OR_FOLDER))
    """Tokenizer file or folder. null: the tokenizer in `model_path`."""
    weights_folder: Path | None = option(None, path(Kind.FOLDER), expert=True)
    """Folder in which a training program writes one folder for each version of the weights. POST
    /v1/update_weights?version=NAME serves the version of that name. null: the server refuses this route."""
    generation_config: str = option("auto", choice(("auto", "none")))
    """Defaults of OpenAI requests. `auto`: temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens of
    the model's generation_config.json, for requests that do not set them. `none`: this server's own defaults."""
    pooling: str = option("auto", choice(("auto", "last", "none")))
    """Pooling for `/v1/embeddings`, `/v1/score` and `/v1/rerank`. `auto`: as the model folder specifies, for embedding
    models and rerankers. `last`: the normalized last hidden state of the last token, for any model without a
    classifier. Without pooling, and with `none`, the server refuses these routes."""
    max_generate_length: int = option(DEFAULT_MAX_GENERATE_LENGTH, integer(2), derived=True)
    """Maximum context length of a request in tokens: prompt and output together (vLLM's max_model_len). A longer prompt
    is refused with 400. null: the positions of the model, limited by the KV cache where `pa_config.num_blocks` is
    given; 4096 while no model is given."""
    seq_length: tuple[int, ...] = option((), integers(1), derived=True, reloadable=True)
    """Maximum prompt length in tokens; a longer prompt is refused with 400. Older files list prefill buckets: the
    largest entry counts. null: `max_generate_length`."""
    decode_batch_size: int = option(128, largest(1), reloadable=True)
    """Number of running slots: requests that one replica computes at the same time (vLLM's max_num_seqs). Further
    requests wait in the queue. Older files have a list, whose largest entry counts."""
    model_dtype: str = option("bfloat16", choice(MODEL_DTYPES, _DTYPE_ALIASES))
    """Data type of weights, activations and KV cache, also as `DataType.FLOAT16`. Ascend has no float32."""
    model_cfg_path: Path | None = option(None, path(Kind.FILE))
    """MindFormers model YAML. Its `context` and `model.model_config` set the keys that this file does not give."""
    vocab_size: int | None = option(None, integer(1), expert=True)
    """Number of entries in the vocabulary. A value that differs from the model's is an error. null: the model's own."""
    end_token: int | None = option(None, integer(0), expert=True)
    """Token id that ends a response. It must be one of the model's end tokens. null: the model's own."""
    pad_token_id: int | None = option(None, integer(0), expert=True)
    """Padding token id. No effect, because steps are packed without padding. null: the model's own."""
    prefill_batch_size: int | None = option(None, largest(1), expert=True, reloadable=True)
    """Maximum number of prompts in one prefill step. null: only `scheduler_config.max_prefill_tokens` limits them."""
    batch_waiting_time: float = option(0.0, SECONDS, expert=True, reloadable=True)
    """Seconds that an idle scheduler waits for more prompts before it starts a prefill step or a static batch."""
    batching_strategy: str = option("continuous", choice(BATCHING_STRATEGIES), expert=True)
    """`continuous`: requests join and leave the batch at every step. `static`: a batch runs to its end."""
    page_attention: bool = option(True, BOOLEAN, expert=True)
    """Accepted from older files. The KV cache is always paged; False is reported in the log."""
    backend: str = option("kbk", choice(("kbk", "ge")), expert=True)
    """`kbk`: MindSpore's graph mode, kernel by kernel. `ge`: exported graphs in `mindir_path`, run by mindspore_lite's
    graph engine on Ascend. Without `mindir_path`, `ge` means `kbk`."""
    mindir_path: Path | None = option(None, path(Kind.FOLDER), expert=True)
    """Folder that `llm-serving export` wrote for this configuration, for `backend: ge`. It contains the weights and a
    KV cache of `pa_config.num_blocks` blocks."""
    mindir_ini: Path | None = option(None, path_or_first(Kind.FILE), expert=True)
    """File with options of the graph engine, for `mindir_path`. Older files name it `model_path.decode_ini`."""
    implementation: str = option("native", choice(tuple(ImplementationName)), expert=True)
    """Implementation of the network. `native`: this project's. `mindformers`: MindFormers' class for Llama, Qwen2,
    Qwen3, GLM and DeepSeek-V3, with this server's KV cache, batches and weights. `mindformers-legacy`: the
    `LlamaForCausalLM` of MindFormers before version 2. `scripts/install_mindformers.sh` installs both. On a CPU they
    require `device_config.kernels: primitives`."""

    @cached_property
    def max_input_len(self) -> int:
        return min(max(self.seq_length, default=self.max_generate_length), self.max_generate_length)

    @property
    def folder(self) -> Path:
        """Folder or GGUF file of the model. Call it only if `model_path` is set."""
        assert self.model_path is not None
        return self.model_path


# --- agreement with the model's files -------------------------------------------------------------------------------

MODEL_SOURCE: Final = "model config.json"
_SAME_SHAPE: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def check_model(values: Values, spec: ModelSpec | None, mindformers: MindFormersFile | None) -> None:
    """Check keys against the model's files, and set keys that are not given, such as `end_token`, from these files."""
    described = mindformers.spec if mindformers is not None else None
    if spec is not None:
        path = values["model_config.model_path"]
        config = path if is_gguf(path) else path / "config.json"
        if mindformers is not None and described is not None:
            _check_same_model(values, mindformers, described, spec, str(config))
        _agree(values, "model_config.vocab_size", [spec.vocab_size], str(config))
        _agree(values, "model_config.end_token", spec.eos_token_ids, str(config))
        _agree_pad_token(values, spec, str(config))
        longest = context_lengths(spec, values["model_config.model_path"])
        _limit_length(values, longest, MODEL_SOURCE, spec)
    elif described is not None and not values.is_given("model_config.max_generate_length"):
        # MindFormers compiles its networks for `seq_length`, which may be shorter than what the model supports.
        own = described.max_position_embeddings
        _limit_length(values, ContextLengths(own, own), "MindFormers YAML")
    for name in ("model_config.end_token", "model_config.pad_token_id"):
        vocab_size = values["model_config.vocab_size"]
        if vocab_size is not None and values[name] is not None and values[name] >= vocab_size:
            raise values.error(name, f"must be < model_config.vocab_size {vocab_size}")


def _check_same_model(
    values: Values, file: MindFormersFile, described: ModelSpec, spec: ModelSpec, config: str
) -> None:
    """Check that a MindFormers YAML describes the served model. Keys that it omits are not compared."""
    compared = [(name, described.config_value(name), spec.config_value(name)) for name in _SAME_SHAPE]
    if file.has_theta:
        compared.append(("rope_theta", _thetas(described), _thetas(spec)))
    if file.has_scaling:
        compared.append(("rope_scaling", _scalings(described), _scalings(spec)))
    for name, ours, theirs in compared:
        if ours != theirs:
            raise ConfigError(
                f"{values.source('model_config.model_cfg_path')}: the MindFormers YAML describes a model with {name} "
                f"{ours}, but {config} says {theirs}; leave out model_config.model_cfg_path or serve the model that "
                "the YAML describes"
            )


def _thetas(spec: ModelSpec) -> str:
    return ", ".join(map(str, sorted({rotary.theta for rotary in spec.network.rotaries})))


def _scalings(spec: ModelSpec) -> str:
    return ", ".join(sorted({_describe_scaling(rotary.scaling) for rotary in spec.network.rotaries}))


def _describe_scaling(scaling: Scaling | None) -> str:
    if scaling is None:
        return "none"
    if scaling.kind == "linear":  # this kind of scaling does not use the original length
        scaling = replace(scaling, original=Scaling.original)
    given = [(item, getattr(scaling, item.name)) for item in fields(scaling) if item.name != "kind"]
    return " ".join([scaling.kind, *(f"{item.name} {value}" for item, value in given if value != item.default)])


def _agree(values: Values, name: str, own: Sequence[int], config: str) -> None:
    """Check that a given key has one of the model's `own` values. If it is not given, set it to the only such value."""
    if values.is_given(name):
        if own and values[name] not in own:
            raise values.error(name, f"must be {' or '.join(map(str, own))} as in {config}, or be left out")
    elif len(own) == 1:
        values.set(name, own[0], MODEL_SOURCE)


def _agree_pad_token(values: Values, spec: ModelSpec, config: str) -> None:
    """Set the padding token id. A mismatch is only a notice, because folders often lack it and no step is padded."""
    name = "model_config.pad_token_id"
    if spec.pad_token_id is None:
        return
    if not values.is_given(name):
        values.set(name, spec.pad_token_id, MODEL_SOURCE)
    elif values[name] != spec.pad_token_id:
        values.notice(name, f"{values[name]} differs from {spec.pad_token_id} in {config}; nothing is padded with it")


def _longest_in_cache(values: Values, length: int, spec: ModelSpec | None) -> int:
    """Return the length in tokens, up to `length`, of the longest request that fits into `pa_config.num_blocks`."""
    num_blocks, block_size = values["pa_config.num_blocks"], int(values["pa_config.block_size"])
    if num_blocks is None:
        return length
    if spec is None:
        return min(length, int(num_blocks) * block_size)
    if groups_layers(values["device_config.device_target"], values[KERNELS], values["pa_config.disk_cache_path"]):
        spec = spec.with_cache_groups(length, int8=values["quant_config.kv_cache_dtype"] == KVCacheDtypeName.INT8)
    groups = CacheGroups.of(spec.layout.windows, values["scheduler_config.max_prefill_tokens"], length)
    longest: int = groups.max_request_tokens(block_size, spec.layout.num_blocks(num_blocks))
    return min(length, longest)


def _limit_length(values: Values, longest: ContextLengths, source: str, spec: ModelSpec | None = None) -> None:
    name, is_given = "model_config.max_generate_length", values.is_given("model_config.max_generate_length")
    positions = longest.maximum if is_given else longest.default
    if longest.reason and positions == longest.maximum:
        source += f": {longest.reason}"
    if is_given:
        if values[name] > positions:
            raise values.error(name, f"must be <= {positions}, the positions of the model ({source})")
        return
    num_blocks, block_size = values["pa_config.num_blocks"], values["pa_config.block_size"]
    if (held := _longest_in_cache(values, positions, spec)) < positions:
        room = f"room of pa_config.num_blocks {num_blocks} x block_size {block_size}; {source}: {positions}"
        values.set(name, max(2, held), room)
    else:
        values.set(name, positions, source)
    # The queue refuses prompts above its token limit, so that limit becomes the default of the maximum prompt length.
    queue = "scheduler_config.max_waiting_tokens"
    waiting_tokens = values[queue]
    if not values.is_given("model_config.seq_length") and waiting_tokens is not None and waiting_tokens < values[name]:
        values.set("model_config.seq_length", (waiting_tokens,), queue)


# --- checks among the keys ------------------------------------------------------------------------------------------

BACKEND: Final = "model_config.backend"
MINDIR_PATH: Final = "model_config.mindir_path"
MINDIR_INI: Final = "model_config.mindir_ini"
IMPLEMENTATION: Final = "model_config.implementation"

_FOR_GRAPH_ENGINE: Final = (
    ("device_config.device_target", ("Ascend",), "the graph engine runs on Ascend"),
    ("device_config.exactness", (ExactnessName.EXACT,), "one graph computes all steps"),
    ("scheduler_config.preemption_mode", ("recompute",), "the KV cache inside a graph cannot be read"),
    ("pa_config.num_swap_blocks", (0,), "the KV cache inside a graph cannot be read"),
)
_FOR_MINDFORMERS: Final = (
    (KERNELS, ("auto", "primitives"), "its class is a graph of Ascend's primitives"),
    ("device_config.exactness", (ExactnessName.EXACT,), "one graph, with PagedAttention, computes all steps"),
    ("quant_config.quantization", (None,), "its matrix products take weights in model_dtype"),
    ("quant_config.kv_cache_dtype", ("auto",), "its attention reads keys and values in model_dtype"),
    (MINDIR_PATH, (None,), "exported graphs are those of the native network"),
    ("model_config.model_dtype", ASCEND_DTYPES, "its ApplyRotaryPosEmb supports no other type"),
)


def check_lengths(values: Values, spec: ModelSpec | None) -> None:
    length = values["model_config.max_generate_length"]
    longest_input = max(values["model_config.seq_length"], default=length)
    if longest_input > length:
        values.notice("model_config.seq_length", f"{longest_input} is limited to max_generate_length {length}")
    decode_length = values["pa_config.decode_seq_length"]
    if decode_length is not None and decode_length < length:
        text = f"{decode_length} has no effect; max_generate_length {length} applies"
        values.notice("pa_config.decode_seq_length", text)
    num_blocks, block_size = values["pa_config.num_blocks"], values["pa_config.block_size"]
    if num_blocks is not None and (held := _longest_in_cache(values, length, spec)) < length:
        text = f"the KV cache of {num_blocks} x {block_size} tokens holds a request of {held} tokens; "
        text += f"a longer request is refused, although max_generate_length is {length}"
        values.notice("pa_config.num_blocks", text)
    if values["model_config.prefill_batch_size"] == 1:
        text = "1 allows one prompt in a prefill step; leave the key out to pack prompts up to max_prefill_tokens"
        values.notice("model_config.prefill_batch_size", text)
    if not values["model_config.page_attention"]:
        values.notice("model_config.page_attention", "False has no effect: the KV cache is always paged")
    if values["model_config.batching_strategy"] == "static":
        values.notice("model_config.batching_strategy", "static: requests with use_beam_search are refused with 400")


def check_implementation(values: Values, spec: ModelSpec | None) -> None:
    """Check `implementation`. If it selects a network class of MindFormers, set `kernels` to `primitives`, and raise
    ConfigError if the class does not support a setting or the model.
    """
    implementation = values[IMPLEMENTATION]
    if implementation == ImplementationName.NATIVE:
        return
    for name, allowed, why in _FOR_MINDFORMERS:
        values.require(name, allowed, f"with {IMPLEMENTATION}: {implementation}: {why}")
    if spec is not None:
        is_current = implementation == ImplementationName.MINDFORMERS
        find_lacking = unsupported_by_mindformers if is_current else unsupported_by_mindformers_llama
        lacks = find_lacking(spec.architecture, spec.network, values["model_config.max_generate_length"])
        if lacks is not None:
            raise values.error(IMPLEMENTATION, f"must be native for this model: {lacks}")
    values.set(KERNELS, "primitives", values.source(KERNELS))


def check_graph_engine(values: Values) -> None:
    """Check the keys that `backend: ge`, MindSpore's graph engine, requires. Without exported graphs, add a notice that
    the backend is kbk (kernel by kernel) instead.
    """
    if not values.is_given(MINDIR_PATH):
        if values[BACKEND] == "ge":
            values.notice(BACKEND, f"ge is served as kbk: {MINDIR_PATH} names no graphs of `llm-serving export`")
        if values.is_given(MINDIR_INI):
            values.notice(MINDIR_INI, f"{values[MINDIR_INI]} has no effect without {MINDIR_PATH}")
            values.set(MINDIR_INI, None, values.source(MINDIR_INI))
        return
    if values[BACKEND] != "ge":
        raise values.error(MINDIR_PATH, f"must be left out with {BACKEND}: {values[BACKEND]}")
    for name, allowed, why in _FOR_GRAPH_ENGINE:
        values.require(name, allowed, f"with {BACKEND}: ge: {why}")
    if values["pa_config.num_blocks"] is None:
        rule = f"must be given with {BACKEND}: ge: the graph contains a KV cache of fixed size"
        raise values.error("pa_config.num_blocks", rule)
    values.notice(BACKEND, "ge cannot copy KV blocks: requests with n, best_of or beams end with an error")
