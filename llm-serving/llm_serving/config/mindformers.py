"""Reads the MindFormers model YAML that `model_config.model_cfg_path` names."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm_serving.config.legacy import MINDFORMERS_SHAPE, MINDFORMERS_SILENT, MINDFORMERS_TARGETS
from llm_serving.config.yaml_reader import Located, plain, read_yaml
from llm_serving.errors import ConfigError, ModelError
from llm_serving.models.spec import ModelSpec

CHECKPOINT_KEY = "model.model_config.checkpoint_name_or_path"
MODE_KEY = "context.mode"
_OF_THETA: Final = frozenset({"theta", "rope_theta", "rope_ratio", "rope_parameters"})
_OF_SCALING: Final = frozenset({"extend_method", "rope_scaling", "rope_parameters"})


@dataclass(frozen=True)
class MindFormersFile:
    """What a MindFormers YAML says to us.

    Attributes:
        path: The file.
        values: Key of the serving YAML -> value that fills it when it is left out there.
        spec: Shape of the model; None when the file does not describe one.
        says_theta, says_scaling: Whether it says at which base the model rotates, and how that is stretched.
        checkpoint: `checkpoint_name_or_path`, when given.
        notices: What the file says without effect.
    """

    path: Path
    values: dict[str, Located]
    spec: ModelSpec | None
    says_theta: bool
    says_scaling: bool
    checkpoint: Located | None
    notices: tuple[str, ...]


def read_mindformers(path: Path) -> MindFormersFile:
    """Read the file. Its format is MindFormers' own, so a key unknown here is a notice and not an error.

    Raises:
        ConfigError: The file cannot be read, or a shape fact is of a wrong type.
    """
    root = read_yaml(path)
    values: dict[str, Located] = {}
    checkpoint = None
    notices = []
    ignored = []
    for key, item in _flatten(root):
        if item.value is None:
            continue
        target = MINDFORMERS_TARGETS.get(key)
        if key == CHECKPOINT_KEY:
            checkpoint = item if item.value != "" else None
        elif target is not None and not isinstance(item.value, list):
            if target in values and values[target].value != item.value:
                raise ConfigError(f"{item.where}: `{key}` must be {values[target].value} as at {values[target].where}")
            values[target] = item
        elif key.removeprefix("model.model_config.") not in MINDFORMERS_SHAPE and key not in MINDFORMERS_SILENT:
            ignored.append(key)
        if key == MODE_KEY and item.value not in (0, "GRAPH_MODE"):
            notices.append(f"{item.where}: {key} is read as 0: the network runs in graph mode")
    if ignored:
        notices.append(f"{path}: accepted, with no meaning here: {', '.join(ignored)}")
    told = _told_of_model(root)
    says_theta, says_scaling = not told.isdisjoint(_OF_THETA), not told.isdisjoint(_OF_SCALING)
    return MindFormersFile(path, values, spec_of(root), says_theta, says_scaling, checkpoint, tuple(notices))


def spec_of(root: Located) -> ModelSpec | None:
    """What a MindFormers YAML says of the shape of its model; None where it says nothing.

    Raises:
        ModelError: The model is none that can be served.
    """
    model = root.get("model")
    shape = model.get("model_config") if model else None
    if shape is None or shape.get("hidden_size") is None:
        return None
    spec = ModelSpec.from_mindformers(plain(shape), shape.where, _network_of(model))
    experts = moe.get("expert_num") if (moe := root.get("moe_config")) else None
    if experts is not None and isinstance(experts.value, int) and experts.value > 1:
        raise ModelError(
            f"{experts.where}: `moe_config.expert_num` must be 1: networks with experts are served from folders in "
            f"Hugging Face form. Given: {experts.value}"
        )
    return spec


def _told_of_model(root: Located) -> set[str]:
    """Keys of `model.model_config` that have a value."""
    model = root.get("model")
    shape = model.get("model_config") if model else None
    return {key for key, item in shape.items() if item.value is not None} if shape else set()


def _network_of(model: Located | None) -> str:
    """`arch.type` of the section `model`: the class of the network there; empty where it says nothing."""
    arch = model.get("arch") if model is not None else None
    named = arch.get("type") if arch is not None else None
    return named.value if named is not None and isinstance(named.value, str) else ""


def _flatten(root: Located) -> Iterator[tuple[str, Located]]:
    """Dotted keys of `context` and `model.model_config`; every other section as one key."""
    for section, item in root.items():
        if section == "context":
            for key, inner in item.items():
                if key == "jit_config":
                    yield from ((f"context.jit_config.{name}", value) for name, value in inner.items())
                else:
                    yield f"context.{key}", inner
        elif section == "model":
            for key, inner in item.items():
                if key == "model_config":
                    yield from ((f"model.model_config.{name}", value) for name, value in inner.items())
                else:
                    yield f"model.{key}", inner
        else:
            yield section, item
