"""Rules that span several keys, files or the model."""

from dataclasses import fields, replace
from typing import Final

from llm_serving.config.mindformers import MindFormersFile
from llm_serving.config.tls import CERTFILE, KEYFILE, PASSWORD_FILE, tls_context
from llm_serving.config.values import Values
from llm_serving.core.enums import ImplementationName, OrderName, PolicyName, SpeculativeMethodName
from llm_serving.core.window import Window
from llm_serving.errors import ConfigError
from llm_serving.models.context_length import Positions, positions_of
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import ModelSpec
from llm_serving.network.rope import Scaling

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
    """Compare what the files say of the model with the model, and fill what they leave out.

    Raises:
        ConfigError: They contradict each other.
    """
    described = mindformers.spec if mindformers is not None else None
    if spec is not None:
        path = values["model_config.model_path"]
        config = path if is_gguf(path) else path / "config.json"
        if mindformers is not None and described is not None:
            source = values.source("model_config.model_cfg_path")
            _check_same_shape(described, source, spec, str(config))
            _check_same_rotation(mindformers, described, source, spec, str(config))
        _agree(values, "model_config.vocab_size", spec.vocab_size, str(config))
        _agree_end_token(values, spec, str(config))
        _agree_pad_token(values, spec, str(config))
    known = spec or described
    if known is not None:
        own = known.max_position_embeddings
        if spec is not None:
            longest = positions_of(spec, values["model_config.model_path"])
            _limit_length(values, longest, MODEL_SOURCE, spec.window)
        else:
            _limit_length(values, Positions(own, own), "MindFormers YAML")
    for name in ("model_config.end_token", "model_config.pad_token_id"):
        vocab_size = values["model_config.vocab_size"]
        if vocab_size is not None and values[name] is not None and values[name] >= vocab_size:
            raise values.error(name, f"must be < model_config.vocab_size {vocab_size}", values[name])


def check_sections(values: Values, spec: ModelSpec | None) -> None:
    """Rules among the keys; what is merely surprising becomes a notice.

    Raises:
        ConfigError: A combination that cannot be served.
    """
    _check_door(values)
    _check_request_log(values)
    length = values["model_config.max_generate_length"]
    longest_input = max(values["model_config.seq_length"], default=length)
    if longest_input > length:
        values.notice("model_config.seq_length", f"{longest_input} is limited to max_generate_length {length}")
    decode_length = values["pa_config.decode_seq_length"]
    if decode_length is not None and decode_length < length:
        values.notice(
            "pa_config.decode_seq_length",
            f"{decode_length} is less than max_generate_length {length}, which counts",
        )
    budget, seqs = values["scheduler_config.max_prefill_tokens"], values["model_config.decode_batch_size"]
    if budget < seqs:
        rule = f"must be at least model_config.decode_batch_size {seqs}: a step has room for every running request"
        raise values.error("scheduler_config.max_prefill_tokens", rule, budget)
    order = values["scheduler_config.order"]
    if order not in (None, OrderName.ARRIVAL) and values["scheduler_config.policy"] == PolicyName.FCFS:
        raise values.error("scheduler_config.order", "must be arrival, or be left out, with policy fcfs", order)
    if order == OrderName.FAIR and not values["scheduler_config.tenant_fairness"]:
        rule = "must not be fair while scheduler_config.tenant_fairness is False; leave one of them out"
        raise values.error("scheduler_config.order", rule, order)
    _check_draft_model(values)
    long_prefill = values["scheduler_config.max_long_prefill_tokens"]
    if long_prefill is not None and long_prefill > budget:
        rule = f"must be <= scheduler_config.max_prefill_tokens {budget}, the tokens of a whole step"
        raise values.error("scheduler_config.max_long_prefill_tokens", rule, long_prefill)
    waiting_tokens, longest_prompt = values["scheduler_config.max_waiting_tokens"], min(longest_input, length)
    if waiting_tokens is not None and waiting_tokens < longest_prompt:
        rule = f"must be >= {longest_prompt}, the longest prompt: it would be refused for ever"
        raise values.error("scheduler_config.max_waiting_tokens", rule, waiting_tokens)
    num_blocks, block_size = values["pa_config.num_blocks"], values["pa_config.block_size"]
    if num_blocks is not None and _longest_in_cache(values, length, None if spec is None else spec.window) < length:
        values.notice(
            "pa_config.num_blocks",
            f"the KV cache holds {num_blocks} x {block_size} = {num_blocks * block_size} tokens; "
            f"a longer request is refused, although max_generate_length is {length}",
        )
    if values["model_config.prefill_batch_size"] == 1:
        values.notice(
            "model_config.prefill_batch_size",
            "1 lets only one prompt into a step; leave the key out to pack prompts up to max_prefill_tokens",
        )
    if not values["model_config.page_attention"]:
        values.notice("model_config.page_attention", "False has no meaning here: the KV cache is always paged")


def _check_request_log(values: Values) -> None:
    place, path = values["serving_config.request_log"], values["serving_config.request_log_path"]
    if place == "disk" and path is None:
        raise values.error("serving_config.request_log_path", "must be given with request_log: disk", path)
    if place == "none" and values["serving_config.resume_streams"]:
        rule = "must be False with request_log: none, which has nothing to resume from"
        raise values.error("serving_config.resume_streams", rule, True)


def _check_door(values: Values) -> None:
    name, body = "serving_config.max_buffered_bytes", values["serving_config.max_request_body_bytes"]
    if values[name] < 2 * body:
        if values.is_given(name):
            rule = f"must be at least twice max_request_body_bytes {body}, or the first bodies would end the others"
            raise values.error(name, rule, values[name])
        values.set(name, 2 * body, "twice max_request_body_bytes")
    _check_tls(values)
    url, headers = values["serving_config.max_url_bytes"], values["serving_config.max_header_bytes"]
    if url >= headers:
        rule = f"must be less than max_header_bytes {headers}, of which the URL is part"
        raise values.error("serving_config.max_url_bytes", rule, url)


def _check_tls(values: Values) -> None:
    certfile, keyfile, password_file = values[CERTFILE], values[KEYFILE], values[PASSWORD_FILE]
    if certfile is None:
        for name, given in ((KEYFILE, keyfile), (PASSWORD_FILE, password_file)):
            if given is not None:
                raise values.error(name, "must be that of a certificate, ssl_certfile", given)
        return
    try:
        tls_context(certfile, keyfile, password_file)
    except ConfigError as error:
        name = str(error).partition(": ")[0]
        raise ConfigError(f"{values.source(name)}: {error}") from None


def _fit_longest_prompt(values: Values) -> None:
    """Where nobody says how long a prompt may be, the waiting room does: it refuses longer ones anyhow."""
    name, waiting_tokens = "scheduler_config.max_waiting_tokens", values["scheduler_config.max_waiting_tokens"]
    if values.is_given("model_config.seq_length") or waiting_tokens is None:
        return
    if waiting_tokens < values["model_config.max_generate_length"]:
        values.set("model_config.seq_length", (waiting_tokens,), name)


def _check_same_shape(described: ModelSpec, source: str, spec: ModelSpec, config: str) -> None:
    for fact in _SAME_SHAPE:
        _check_same(fact, described.fact(fact), spec.fact(fact), source, config)


def _check_same_rotation(
    file: MindFormersFile, described: ModelSpec, source: str, spec: ModelSpec, config: str
) -> None:
    """Of what the file says itself: it does not contradict by what it leaves out."""
    if file.says_theta:
        _check_same("rope_theta", _thetas(described), _thetas(spec), source, config)
    if file.says_scaling:
        _check_same("rope_scaling", _scalings(described), _scalings(spec), source, config)


def _thetas(spec: ModelSpec) -> str:
    return ", ".join(map(str, sorted({each.theta for each in spec.network.rotaries})))


def _scalings(spec: ModelSpec) -> str:
    return ", ".join(sorted({_told(each.scaling) for each in spec.network.rotaries}))


def _told(scaling: Scaling | None) -> str:
    if scaling is None:
        return "none"
    if scaling.kind == "linear":  # whatever it was trained on
        scaling = replace(scaling, original=Scaling.original)
    given = [(each.name, getattr(scaling, each.name)) for each in fields(scaling) if each.name != "kind"]
    defaults = {each.name: each.default for each in fields(scaling)}
    return " ".join([scaling.kind, *(f"{name} {value}" for name, value in given if value != defaults[name])])


def _check_same(fact: str, ours: object, theirs: object, source: str, config: str) -> None:
    if ours != theirs:
        raise ConfigError(
            f"{source}: the MindFormers YAML describes a model with {fact} {ours}, but {config} says {theirs}; leave "
            f"out model_config.model_cfg_path or name the model it describes"
        )


def _agree(values: Values, name: str, own: int, config: str) -> None:
    if not values.is_given(name):
        values.set(name, own, MODEL_SOURCE)
    elif values[name] != own:
        raise values.error(name, f"must be {own} as in {config}, or be left out", values[name])


def _agree_end_token(values: Values, spec: ModelSpec, config: str) -> None:
    name = "model_config.end_token"
    if values.is_given(name):
        if spec.eos_token_ids and values[name] not in spec.eos_token_ids:
            own = " or ".join(map(str, spec.eos_token_ids))
            raise values.error(name, f"must be {own} as in {config}, or be left out", values[name])
    elif len(spec.eos_token_ids) == 1:
        values.set(name, spec.eos_token_ids[0], MODEL_SOURCE)


def _agree_pad_token(values: Values, spec: ModelSpec, config: str) -> None:
    """A different padding token is only a notice: folders often leave it out, and nothing is padded with it."""
    name = "model_config.pad_token_id"
    if spec.pad_token_id is None:
        return
    if not values.is_given(name):
        values.set(name, spec.pad_token_id, MODEL_SOURCE)
    elif values[name] != spec.pad_token_id:
        values.notice(name, f"{values[name]} differs from {spec.pad_token_id} in {config}; nothing is padded with it")


def _longest_in_cache(values: Values, length: int, window: int | None) -> int:
    """Tokens of the longest request that `pa_config.num_blocks` have room for, of those up to `length`."""
    num_blocks, block_size = values["pa_config.num_blocks"], values["pa_config.block_size"]
    if num_blocks is None:
        return length
    return min(length, Window.of(window, 1, length).longest(block_size, num_blocks))


def _limit_length(values: Values, longest: Positions, source: str, window: int | None = None) -> None:
    name = "model_config.max_generate_length"
    positions = longest.most if values.is_given(name) else longest.usual
    if longest.reason and positions == longest.most:
        source += f": {longest.reason}"
    if not values.is_given(name):
        num_blocks, block_size = values["pa_config.num_blocks"], values["pa_config.block_size"]
        if _longest_in_cache(values, positions, window) < positions:
            room = f"room of pa_config.num_blocks {num_blocks} x block_size {block_size}; {source}: {positions}"
            values.set(name, max(2, num_blocks * block_size), room)
        else:
            values.set(name, positions, source)
        _fit_longest_prompt(values)
    elif values[name] > positions:
        raise values.error(name, f"must be <= {positions}, the positions of the model ({source})", values[name])


def _check_draft_model(values: Values) -> None:
    """A draft model computes beside the model, in one process of this project's own network."""
    method, path = values["scheduler_config.speculative_method"], values["scheduler_config.draft_model_path"]
    if path is None:
        if method == SpeculativeMethodName.DRAFT_MODEL:
            rule = "must not be draft_model without scheduler_config.draft_model_path"
            raise values.error("scheduler_config.speculative_method", rule, method)
        return
    if method != SpeculativeMethodName.DRAFT_MODEL:
        rule = "must be draft_model with scheduler_config.draft_model_path"
        raise values.error("scheduler_config.speculative_method", rule, method)
    for name, served in (
        ("cluster_config.tensor_parallel", 1),
        ("model_config.mindir_path", None),
        ("model_config.implementation", ImplementationName.NATIVE),
    ):
        if values[name] != served:
            raise values.error(name, f"must be {served} with scheduler_config.draft_model_path", values[name])
