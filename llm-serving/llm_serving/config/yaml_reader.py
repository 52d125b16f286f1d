"""Read YAML into plain values with line numbers, and limit the size and nesting of any input."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from llm_serving.errors import ConfigError, shorten

MAX_FILE_BYTES: Final = 2**20
MAX_VALUES: Final = 20_000
"""Maximum number of values after aliases are expanded. A short text of nested aliases can expand to billions."""
MAX_DEPTH: Final = 32


@dataclass(frozen=True)
class Located:
    """A YAML value and its source: "file:line", or a flag such as "--set"."""

    value: Any
    """None, a bool, int, float or str, a list of plain values, or a dict of `Located`."""
    where: str

    def items(self) -> Iterator[tuple[str, "Located"]]:
        if self.value is None:
            return
        if not isinstance(self.value, dict):
            raise ConfigError(f"{self.where}: must be a mapping of keys to values. Given: {shorten(self.value)}")
        yield from self.value.items()

    def get(self, *keys: str) -> "Located | None":
        """Return the value of a key, or of keys in nested mappings. Return None if it is missing or null."""
        found: Located | None = self
        for key in keys:
            found = None if found is None else dict(found.items()).get(key)
        return None if found is None or found.value is None else found


def read_yaml(path: Path, keys_in: str = "configs/serving.yaml") -> Located:
    """Read a YAML mapping. Raise ConfigError if the file is unreadable, too large, no mapping or has a key twice.
    `keys_in`: file with all keys, which the error for an empty file names.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: must be at most {MAX_FILE_BYTES} bytes")
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    root = _parse(content, str(shown))
    if root.value is None:
        raise ConfigError(f"{path}: is empty; {keys_in} lists every key")
    if not isinstance(root.value, dict):
        raise ConfigError(f"{root.where}: must be a mapping of sections. Given: {shorten(root.value)}")
    return root


def read_value(text: str, where: str) -> Located:
    return _parse(text.encode("utf-8", "surrogatepass"), where, show_lines=False)


def plain(located: Located) -> Any:
    if isinstance(located.value, dict):
        return {key: plain(item) for key, item in located.value.items()}
    return located.value


def _parse(content: bytes, name: str, show_lines: bool = True) -> Located:
    try:
        loader = _Loader(content)
        loader.file, loader.show_lines = name, show_lines
        node = loader.get_single_node()
        return Located(None, name) if node is None else loader.build(node, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark and show_lines else name
        if isinstance(error, _TooDeepError):
            raise ConfigError(f"{where}: must be nested at most {MAX_DEPTH} deep") from None
        raise ConfigError(f"{where}: is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{name}: is not valid YAML: {shorten(str(error))}") from None


class _TooDeepError(yaml.MarkedYAMLError):
    pass


class _Loader(yaml.SafeLoader):
    """Converts YAML into `Located` values. It stops at a value that is nested too deep, because reading the rest would
    take quadratic time.
    """

    file: str
    show_lines: bool
    depth = 0
    num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH + 1:
            raise _TooDeepError(problem_mark=self.peek_event().start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def where(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}" if self.show_lines else self.file

    def build(self, node: yaml.Node, depth: int) -> Located:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise ConfigError(f"{self.where(node)}: must hold at most {MAX_VALUES} values, aliases expanded")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{self.where(node)}: must be nested at most {MAX_DEPTH} deep")
        if isinstance(node, yaml.MappingNode):
            return Located(self.mapping(node, depth), self.where(node))
        if isinstance(node, yaml.SequenceNode):
            return Located([plain(self.build(item, depth + 1)) for item in node.value], self.where(node))
        try:
            return Located(self.construct_object(node), self.where(node))
        except (KeyError, IndexError, AttributeError):  # PyYAML's constructors raise them for tags such as `!!bool x`
            raise ConfigError(
                f"{self.where(node)}: must match its YAML tag {node.tag}. Correct the value or remove the tag. "
                f"Given: {shorten(node.value)}"
            ) from None

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Located]:
        own: dict[str, Located] = {}
        merged: dict[str, Located] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged |= self.merge(value_node, depth)
                continue
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not isinstance(key, str):
                raise ConfigError(f"{self.where(key_node)}: a key must be text")
            if key in own:
                raise ConfigError(
                    f"{self.where(key_node)}: key {shorten(key)} is given twice, also at {own[key].where}"
                )
            item = self.build(value_node, depth + 1)
            # The line of the key, also when the value starts on a later line or is an alias.
            own[key] = Located(item.value, self.where(key_node))
        return merged | own

    def merge(self, node: yaml.Node, depth: int) -> Mapping[str, Located]:
        """Return the merged content of `<<: *alias` or `<<: [*first, *second]`; the first mapping with a key wins."""
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Located] = {}
        for item in items:
            if not isinstance(item, yaml.MappingNode):
                raise ConfigError(f"{self.where(node)}: `<<` must be followed by mappings")
            built = self.build(item, depth + 1)
            result = dict(built.items()) | result
        return result
