"""Turns YAML, overrides and a model folder into a checked `ServingConfig`. The first source that gives a value wins:
`--set` or `--model`, the serving YAML, the MindFormers YAML that it names, the model's config.json, a rule that derives
it from other keys, the default. `null` gives no value.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llm_serving.config import legacy
from llm_serving.config.model_size import check_device_memory
from llm_serving.config.models import OF_ROWS, ModelRow, combine, read_row
from llm_serving.config.models import SECTION as MODELS
from llm_serving.config.paths import CREATED, DEMO_WORD, find, resolve, resolve_model, search_folders
from llm_serving.config.rules import nearest
from llm_serving.config.schema import DEFAULTS, OPTIONS, RULES, SECTIONS, TABLES, Origin, ServingConfig
from llm_serving.config.sections.cluster import check_cluster
from llm_serving.config.sections.device import check_device, set_block_size
from llm_serving.config.sections.lora import MODULES, check_lora
from llm_serving.config.sections.model import (
    MINDIR_INI,
    MINDIR_PATH,
    check_graph_engine,
    check_implementation,
    check_lengths,
    check_model,
)
from llm_serving.config.sections.scheduler import check_scheduler, choose_step_budget
from llm_serving.config.sections.server import check_server
from llm_serving.config.tables import TableReader, check_tables
from llm_serving.config.values import Values
from llm_serving.config.yaml_reader import Located, plain, read_value, read_yaml
from llm_serving.errors import ConfigError, ModelError, shorten
from llm_serving.formats.folder import convert_command
from llm_serving.hub import locate
from llm_serving.models.gguf import gguf_name, is_gguf
from llm_serving.models.spec import ModelSpec

MODEL_PATH: Final = "model_config.model_path"
MODEL_CFG_PATH: Final = "model_config.model_cfg_path"
DRAFT_MODEL_PATH: Final = "scheduler_config.draft_model_path"
MODEL_NAME: Final = "model_config.model_name"
MODEL_ALIASES: Final = "model_config.model_aliases"
MODEL_DTYPE: Final = "model_config.model_dtype"
DEVICE_TARGET: Final = "device_config.device_target"
AGENT_PORTS: Final = "serving_config.agent_ports"
TENSOR_PARALLEL: Final = "cluster_config.tensor_parallel"
ACCEPTED_KEYS: Final = (*RULES, *legacy.ALIASES, *legacy.WITHOUT_EFFECT)
_SECTION_NAMES: Final = tuple(dict.fromkeys([*(name.partition(".")[0] for name in ACCEPTED_KEYS), *TABLES, MODELS]))


class FlagOverride(str):
    """An override by a flag such as `--port`. Errors and `ServingConfig.sources` name the flag instead of `--set`."""

    flag: str


@dataclass(frozen=True)
class _Given:
    value: Any
    source: str
    folders: tuple[Path, ...]
    is_override: bool = False


@dataclass
class _Reading:
    given: dict[str, _Given] = field(default_factory=dict)
    tables: dict[str, TableReader] = field(default_factory=lambda: {name: TableReader(name) for name in TABLES})
    notices: list[str] = field(default_factory=list)
    num_rank_graphs: int = 1
    """Number of graph files that an older YAML lists, one for each rank."""


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), model: str | Path | None = None
) -> ServingConfig:
    """Read and check a configuration. ConfigError names file and line, key, violated rule and value.

    Args:
        path: The serving YAML. If it is None, all keys have their defaults.
        overrides: "section.key=value" or, in a section with rows, "section.row.key=value"; the value is YAML.
        model: Replaces `model_config.model_path`: a folder, `demo`, or a name on a hub, from which small files may be
            downloaded to check that the model is supported.
    """
    sections = [] if path is None else list(_sections(read_yaml(path)))
    models = [content for section, content in sections if section == MODELS]
    rows = [read_row(name, item) for content in models for name, item in content.items()]
    if not rows:
        return _load(path, sections, overrides, model)
    if model is not None:
        raise ConfigError(f"--model must not be given with `{MODELS}`, whose rows have paths. Given: {model}")
    configs = combine(rows, [_load(path, sections, overrides, None, row) for row in rows])
    return dataclasses.replace(configs[0], models=configs)


def _load(
    path: Path | None,
    sections: Sequence[tuple[str, Located]],
    overrides: Sequence[str],
    model: str | Path | None,
    row: ModelRow | None = None,
) -> ServingConfig:
    reading = _Reading()
    folders = () if path is None else search_folders(path.parent)
    for section, content in sections:
        if section in TABLES:
            reading.tables[section].read(content)
        elif section != MODELS:
            for key, item in content.items():
                _accept(reading, f"{section}.{key}", _Given(plain(item), item.where, folders))
    if row is not None:
        _accept_row(reading, row, folders)
    for override in overrides:
        _accept_override(reading, override)
    if model is not None:
        reading.given[MODEL_PATH] = _Given(str(model), "--model", (Path.cwd(),), is_override=True)
    _use_rank_ports(reading)
    mindformers = _read_mindformers(reading)
    values = _typed(reading)
    if mindformers is not None:
        _use_checkpoint(values, mindformers)
    spec = _resolve_paths(values, reading)
    _check(values, spec, mindformers, reading.tables)
    origin = Origin(path, tuple(overrides), model, None if row is None else row.name)
    config = dataclasses.replace(_build(values, reading.tables), origin=origin)
    if spec is not None:
        check_device_memory(config, spec)
    return config


def _accept_row(reading: _Reading, row: ModelRow, folders: tuple[Path, ...]) -> None:
    for name in OF_ROWS:
        if (given := reading.given.get(name)) is not None:
            rule = f"must be given in the rows of `{MODELS}` only"
            raise ConfigError(f"{given.source}: `{name}` {rule}. Given: {shorten(given.value)}")
    # With several models the default is no alias, because the default aliases of a single model would be ambiguous.
    aliases, own_name = Located([], row.where), Located(row.name, row.where)
    for name, item in ((MODEL_ALIASES, aliases), *row.keys, (MODEL_NAME, own_name)):
        _accept(reading, name, _Given(plain(item), item.where, folders, is_override=True))


def _check(
    values: Values, spec: ModelSpec | None, mindformers: legacy.MindFormersFile | None, tables: dict[str, TableReader]
) -> None:
    set_block_size(values, spec)
    choose_step_budget(values, spec)
    check_model(values, spec, mindformers)
    for name, option in OPTIONS.items():
        if option.only_with is not None and values[name] != DEFAULTS[name]:
            other, needed = option.only_with
            if values[other] != needed and (needed is not ... or values[other] is None):
                raise values.error(name, f"must come with `{other}{'' if needed is ... else f': {needed}'}`")
    check_server(values)
    check_scheduler(values, spec)
    check_lengths(values, spec)
    check_implementation(values, spec)
    check_cluster(values, spec)
    check_device(values, spec, mindformers)
    check_graph_engine(values)
    check_lora(values, spec)
    check_tables(values, tables)


def _build(values: Values, tables: dict[str, TableReader]) -> ServingConfig:
    sections = {
        attribute: section_type(
            **{item.name: values[f"{section}.{item.name}"] for item in dataclasses.fields(section_type)}
        )
        for section, (attribute, section_type) in SECTIONS.items()
    }
    sources = {name: values.source(name) for name in DEFAULTS}
    for table in tables.values():
        sources.update(table.sources())
    return ServingConfig(
        **sections,
        request_classes=tuple(sorted(tables["request_classes"].build(), key=lambda row: row.rank)),
        api_keys=tables["api_keys"].build(),
        sources=sources,
        notices=tuple(values.notices),
        hub_model=values.hub_model,
        model_hint=values.model_hint,
    )


# --- keys as written ------------------------------------------------------------------------------------------------


def _sections(root: Located) -> Iterator[tuple[str, Located]]:
    for section, content in root.items():
        if section not in _SECTION_NAMES:
            raise ConfigError(f"{content.where}: unknown section `{section}`; {nearest(section, _SECTION_NAMES)}")
        if section == "model_path" and isinstance(content.value, str):
            raise ConfigError(f"{content.where}: `model_path` must be a section; to name a model, set {MODEL_PATH}")
        yield section, content


def _accept_override(reading: _Reading, text: str) -> None:
    name, equals, value = text.partition("=")
    section, *keys = name.strip().split(".")
    form = "section.row.key=value" if section in TABLES else "section.key=value"
    if not equals or len(keys) != form.count("."):
        raise ConfigError(f"--set must be {form}. Given: {shorten(text)}")
    located = read_value(value, f"--set {name.strip()}")
    source = text.flag if isinstance(text, FlagOverride) else "--set"
    if section in TABLES:
        reading.tables[section].set(keys[0], keys[1], Located(located.value, source))
    else:
        _accept(reading, name.strip(), _Given(plain(located), source, search_folders(None), is_override=True))


def _accept(reading: _Reading, name: str, given: _Given) -> None:
    """Store a key's value; an override replaces it. Raise ConfigError for an unknown key or contradicting files."""
    if name in legacy.RANK_GRAPHS and isinstance(given.value, list):
        reading.num_rank_graphs = max(reading.num_rank_graphs, len(given.value))
    if name in legacy.WITHOUT_EFFECT:
        reading.notices.append(f"{given.source}: {name} is accepted without effect: {legacy.WITHOUT_EFFECT[name]}")
        return
    target = legacy.ALIASES.get(name, name)
    if target not in RULES:
        raise ConfigError(f"{given.source}: unknown key `{name}`; {_nearest_key(name)}")
    if name in legacy.RENAMED:
        reading.notices.append(f"{given.source}: {name} is now called {target}; the next release refuses the old name")
    before = reading.given.get(target)
    if given.value is None:
        if given.is_override:
            reading.given.pop(target, None)
        return
    if before is not None and not given.is_override and before.value != given.value:
        raise ConfigError(
            f"{given.source}: `{name}` must agree with {before.source}, which sets the same key to "
            f"{shorten(before.value)}. Given: {shorten(given.value)}"
        )
    # The vocab_file of an older file may be relative to a folder that exists only on another machine.
    if name == "tokenizer.vocab_file" and find(Path(str(given.value)), given.folders) is None:
        reading.notices.append(
            f"{given.source}: {name} {shorten(given.value)} does not exist; the model's folder has the tokenizer"
        )
        return
    reading.given[target] = given


def _use_rank_ports(reading: _Reading) -> None:
    """If an older YAML lists several agent ports and as many graph files, read them as the ranks of one replica."""
    given, count = reading.given.get(AGENT_PORTS), reading.num_rank_graphs
    if given is None or given.is_override or TENSOR_PARALLEL in reading.given:
        return
    if count > 1 and isinstance(given.value, list) and len(given.value) == count:
        reading.given[AGENT_PORTS] = dataclasses.replace(given, value=given.value[:1])
        reading.given[TENSOR_PARALLEL] = dataclasses.replace(given, value=count)
        reading.notices.append(
            f"{given.source}: {AGENT_PORTS}: {count} ports with {count} graphs are read as the ranks of one replica, "
            f"{TENSOR_PARALLEL}: {count}"
        )


def _nearest_key(name: str) -> str:
    section, _, key = name.partition(".")
    if section not in _SECTION_NAMES:
        return nearest(name, ACCEPTED_KEYS)
    elsewhere = [known for known in ACCEPTED_KEYS if known.partition(".")[2] == key]
    if elsewhere:
        return f"it is known as `{elsewhere[0]}`"
    own = [known for known in ACCEPTED_KEYS if known.startswith(section + ".") and known not in legacy.RENAMED]
    return nearest(name, own)


def _parse(name: str, given: _Given) -> Any:
    return RULES[name].value_of(f"`{name}`", given.value, given.source)


def _typed(reading: _Reading) -> Values:
    values = Values(DEFAULTS, reading.notices)
    for name in RULES:
        if (given := reading.given.get(name)) is not None:
            values.set(name, _parse(name, given), given.source)
    return values


# --- MindFormers' YAML ----------------------------------------------------------------------------------------------


def _read_mindformers(reading: _Reading) -> legacy.MindFormersFile | None:
    given = reading.given.get(MODEL_CFG_PATH)
    if given is None:
        _use_compute_dtype(reading, None)
        return None
    path = resolve(_parse(MODEL_CFG_PATH, given), given.folders, MODEL_CFG_PATH, given.source)
    _check_kind(MODEL_CFG_PATH, path, given.source)
    file = legacy.read_mindformers(path)
    _use_compute_dtype(reading, file)
    for target, item in file.values.items():
        ours = reading.given.get(target)
        if ours is None:
            reading.given[target] = _Given(plain(item), item.where, (path.parent,))
        elif target in legacy.MUST_AGREE and not ours.is_override and ours.value != item.value:
            theirs = next(key for key, value in legacy.MINDFORMERS_TARGETS.items() if value == target)
            raise ConfigError(
                f"{ours.source}: `{target}` is {shorten(ours.value)}, but `{theirs}` at {item.where} is "
                f"{shorten(item.value)}: both must be the same"
            )
    reading.notices.extend(file.notices)
    return file


def _use_compute_dtype(reading: _Reading, file: legacy.MindFormersFile | None) -> None:
    """Replace a `model_dtype` like "DataType.FLOAT32", the form of older servers, by the dtype that they used.

    Older servers ignored their `model_dtype` and used `compute_dtype` of the MindFormers YAML, or MindFormers' default.
    Without a MindFormers YAML, the value is kept, except float32 on Ascend, which does not support it.
    """
    given = reading.given.get(MODEL_DTYPE)
    if given is None or given.is_override or not str(given.value).startswith(legacy.OLDER_DTYPE_PREFIX):
        return
    target = reading.given.get(DEVICE_TARGET)
    on_ascend = target is not None and _parse(DEVICE_TARGET, target) == "Ascend"
    if file is None and not (on_ascend and _parse(MODEL_DTYPE, given) == "float32"):
        return
    item = None if file is None else file.values.get(MODEL_DTYPE)
    value, source = (legacy.MINDFORMERS_DTYPE, "MindFormers' default") if item is None else (plain(item), item.where)
    # An older `DataType.FLOAT16` stays if the MindFormers YAML gives no dtype, because float16 is then its default.
    if _parse(MODEL_DTYPE, given) == _parse(MODEL_DTYPE, _Given(value, source, ())):
        return
    reading.notices.append(
        f"{given.source}: {MODEL_DTYPE}: {given.value} is read as {value}: the older servers only printed it and "
        f"computed in compute_dtype of the MindFormers YAML ({source})"
    )
    reading.given[MODEL_DTYPE] = _Given(value, source, ())


def _use_checkpoint(values: Values, file: legacy.MindFormersFile) -> None:
    if file.checkpoint is None or values.is_given(MODEL_PATH):
        return
    key, item = file.checkpoint
    path = Path(str(item.value))
    found = find(path, search_folders(file.path.parent))
    if found is not None and (found / "config.json").is_file():
        values.set(MODEL_PATH, found, item.where)
        return
    hint = f"{item.where}: {key} {shorten(item.value)} is no folder in Hugging Face form; set {MODEL_PATH} to one"
    if file.spec is not None:
        hint += f", which this command writes: {convert_command(found or path, file.path)}"
    values.notices.append(hint)
    values.model_hint = hint


# --- paths ----------------------------------------------------------------------------------------------------------


def _resolve_paths(values: Values, reading: _Reading) -> ModelSpec | None:
    for name, given in reading.given.items():
        if (kind := RULES[name].kind) is None or name == MODEL_PATH:
            continue
        arguments = values[name], given.folders, name, given.source
        if kind in CREATED:
            values.set(name, _expand_home(name, values[name], given.source), given.source)
        elif name == DRAFT_MODEL_PATH:
            values.set(name, resolve_model(*arguments, str(given.value)) or resolve(*arguments), given.source)
        elif name not in (MINDIR_PATH, MINDIR_INI) or values.is_given(MINDIR_PATH):
            values.set(name, resolve(*arguments), given.source)
        _check_kind(name, values[name], given.source)
    if (lora := reading.given.get(MODULES)) is not None:
        modules = {name: resolve(each, lora.folders, MODULES, lora.source) for name, each in values[MODULES].items()}
        values.set(MODULES, modules, lora.source)
    path = values[MODEL_PATH]
    if path is None:
        return None
    source, written = values.source(MODEL_PATH), reading.given.get(MODEL_PATH)
    found = path if written is None else resolve_model(path, written.folders, MODEL_PATH, source, str(written.value))
    folder = found or _find_on_hub(values, str(path), source)
    _check_kind(MODEL_PATH, folder, source)
    values.set(MODEL_PATH, folder, source)
    if not values.is_given(MODEL_NAME):
        own = gguf_name(folder) if is_gguf(folder) else folder.resolve().name
        shown = DEMO_WORD if str(path) == DEMO_WORD else own
        allowed = "".join(c if c.isalnum() or c in "._-" else "-" for c in shown)[:128]
        values.set(MODEL_NAME, allowed or "model", "name of the model's folder")
    return ModelSpec.from_folder(folder)


def _expand_home(name: str, path: Path, source: str) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # an unknown user, or a user without a home folder
        raise ConfigError(f"{source}: `{name}`: {str(error).rstrip('.')}. Given: {path}") from None


def _check_kind(name: str, path: Any, source: str) -> None:
    kind = RULES[name].kind
    if kind is not None and (why := kind.broken_by(path)) is not None:
        raise ConfigError(f"{source}: `{name}` must be {kind.value}; {why}. Given: {path}")


def _find_on_hub(values: Values, name: str, source: str) -> Path:
    try:
        model = locate(name, values["model_config.model_hub"], values["model_config.model_revision"])
    except ModelError as error:
        raise ModelError(f"{source}: {MODEL_PATH}: {error}") from None
    values.hub_model = model
    values.notices.append(f"{source}: {MODEL_PATH}: {model.source}")
    if not values.is_given(MODEL_NAME):
        values.set(MODEL_NAME, name[:128], "name of the model at its hub")
    return model.folder
