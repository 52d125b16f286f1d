"""Section `model_config`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm_serving.config.kinds import Kind
from llm_serving.config.rules import (
    boolean,
    choice,
    integer,
    integers,
    largest,
    model_names,
    name,
    option,
    path,
    path_or_first,
    revision,
    seconds,
)
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.enums import ImplementationName
from llm_serving.hub import HUBS

BATCHING_STRATEGIES: Final = ("continuous", "static")
_DTYPE_ALIASES: Final = {alias: dtype.name for dtype in MODEL_DTYPES.values() for alias in dtype.aliases}
DEFAULT_MAX_GENERATE_LENGTH: Final = 4096
CLIENT_MODEL_NAMES: Final = ("llama2", "internlm", "tgi", "dummy")
"""Of the older servers' routes; of text-generation's and of huggingface_hub's clients, which send them on their own."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section `model_config`: what is served, and the lengths and batch sizes it is served with."""

    model_name: str = option("model", name())
    """Name of the model in the HTTP routes. Not given: the name of the model's folder."""

    model_aliases: tuple[str, ...] = option(CLIENT_MODEL_NAMES, model_names())
    """Other names by which clients may ask for the model; answers tell `model_name`. `*`: any name. The default is what
    older servers' routes had and what clients send on their own."""

    model_path: Path | None = option(None, path(Kind.FILE_OR_FOLDER))
    """Folder in Hugging Face form (config.json, *.safetensors, tokenizer), a GGUF file, or the name of a model at a
    hub, owner/name, where no such folder exists. The word `demo` is the shipped model."""

    model_hub: str = option("auto", choice(("auto", *HUBS)))
    """Where a model is looked up that `model_path` names. `auto`: in the local caches of Hugging Face and ModelScope,
    then at Hugging Face. One of them: only in its cache and there."""

    model_revision: str | None = option(None, revision())
    """Branch, tag or commit of a model that `model_path` names. None: the hub's main one."""

    generation_config: str = option("auto", choice(("auto", "none")))
    """`auto`: temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens of the model's
    generation_config.json are what OpenAI requests have that give none. `none`: the defaults of this server."""

    pooling: str = option("auto", choice(("auto", "last", "none")))
    """How a text becomes a vector (`/v1/embeddings`, `/v1/score`, `/v1/rerank`). `auto`: as the folder of an embedding
    model says; of another model there are none. `last`: of any model, the last hidden state of the last token, brought
    to length 1. `none`: those routes are refused."""

    tokenizer_path: Path | None = option(None, path(Kind.FILE_OR_FOLDER))
    """Tokenizer file or folder. None: the one in `model_path`."""

    model_cfg_path: Path | None = option(None, path(Kind.FILE))
    """A MindFormers model YAML; its `context` and `model.model_config` fill what this file does not give."""

    max_generate_length: int = option(DEFAULT_MAX_GENERATE_LENGTH, integer(2))
    """Tokens. Most a request may hold, prompt and generated together. Not given: the model's positions, as far as the
    KV cache goes (4096 while no model is named)."""

    seq_length: tuple[int, ...] = option((), integers(1))
    """Tokens. Older files list prefill buckets; the longest is the longest prompt. Empty: `max_generate_length`."""

    vocab_size: int | None = option(None, integer(1))
    """Entries of the vocabulary. None: the model's own. A value that differs from the model's is an error."""

    end_token: int | None = option(None, integer(0))
    """Token id that ends a text. None: those of the model. A value the model does not name is an error."""

    pad_token_id: int | None = option(None, integer(0))
    """Token id for padding. None: the model's own. Steps are packed, so nothing is padded with it."""

    prefill_batch_size: int | None = option(None, largest(1))
    """Requests. Most prompts in one prefill step. None: no limit but `max_prefill_tokens`."""

    decode_batch_size: int = option(128, largest(1))
    """Requests. Most that run at once. Of a list, the largest counts."""

    batch_waiting_time: float = option(0.0, seconds())
    """Seconds an idle server waits for more prompts before it starts a prefill step (static batching: a batch)."""

    batching_strategy: str = option("continuous", choice(BATCHING_STRATEGIES))
    """`continuous`: the batch is formed anew at every step. `static`: collect a batch and run it to its end."""

    page_attention: bool = option(True, boolean())
    """The KV cache is paged always; False is accepted with a notice."""

    model_dtype: str = option("bfloat16", choice(MODEL_DTYPES, _DTYPE_ALIASES))
    """Type of weights, activations and KV cache: bfloat16, float16 or float32 (also `DataType.FLOAT16`)."""

    backend: str = option("kbk", choice(("kbk", "ge")))
    """`kbk`: MindSpore graph mode, kernel by kernel. `ge`: graphs of `mindir_path` by the graph engine of
    mindspore_lite, on Ascend; without `mindir_path` it is served as kbk with a notice."""

    mindir_path: Path | None = option(None, path(Kind.FOLDER))
    """Folder of graphs that `llm-serving export` wrote for this configuration, for `backend: ge`; weights and a cache
    of `pa_config.num_blocks` are in them."""

    mindir_ini: Path | None = option(None, path_or_first(Kind.FILE))
    """File of options of the graph engine for them, as older servers' `model_path.decode_ini` names one."""

    implementation: str = option("native", choice(tuple(ImplementationName)))
    """Whose network computes the model. `native`: that of this project. `mindformers`: MindFormers' own class, for
    Llama, Qwen2, Qwen3 and GLM-4, with the cache, batches and weights of this server; it must be installed
    (`scripts/install_mindformers.sh`). `mindformers-legacy`: its `LlamaForCausalLM` of releases before 2, likewise. On
    a CPU with `kernels: primitives`, which `auto` then is."""

    @property
    def max_input_len(self) -> int:
        """Tokens of the longest prompt."""
        return min(max(self.seq_length, default=self.max_generate_length), self.max_generate_length)
