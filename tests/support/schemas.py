"""Random JSON schemas, and validation of answers."""

from __future__ import annotations

import json
import random
from typing import Any

from jsonschema_rs import validator_for

Schema = dict[str, Any]
_NAMES = ("a", "b", "name", "x-1", "the key", "é", "nested", "list")
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid")
_PATTERNS = ("^[a-c]{1,3}$", "^x", "[0-9]{2}-[0-9]{2}", "^(on|off)$", "^[^a]{0,4}$")
_MAX_DEPTH = 3


def random_schema(seed: int) -> Schema:
    """Return a schema of an object, array or other value; equal seeds give equal schemas."""
    maker = _Maker(random.Random(seed))
    schema = maker.schema(0)
    if maker.names:
        schema = {**schema, "$defs": {name: maker.leaf() for name in maker.names}}
    return schema


def fault_of(schema: Schema, answer: str) -> str | None:
    """Return why an answer is not JSON that fits a schema; None if it fits."""
    try:
        value = json.loads(answer)
    except ValueError as error:
        return f"is no JSON: {error}"
    error = next(validator_for(schema, validate_formats=True).iter_errors(value), None)
    return None if error is None else error.message


class _Maker:
    def __init__(self, choice: random.Random) -> None:
        self._random = choice
        self.names: list[str] = []
        """Names of definitions that the schema refers to."""

    def schema(self, depth: int) -> Schema:
        if depth >= _MAX_DEPTH:
            return self.leaf()
        makers = [self._object, self._object, self._array, self._any_of, self.leaf]
        if depth > 0:
            makers += [self.leaf, self._reference]
        return self._random.choice(makers)(depth)

    def leaf(self, depth: int = 0) -> Schema:
        del depth
        return self._random.choice([self._string, self._number, self._integer, self._enum, self._plain])()

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._random.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self.schema(depth + 1) for name in names}}
        schema["required"] = [name for name in names if self._random.random() < 0.7]
        others = self._random.choice([False, False, False, self.leaf(), None])
        if others is not None:
            schema["additionalProperties"] = others
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        schema: Schema = {"type": "array", "minItems": least, "maxItems": least + self._random.randint(0, 2)}
        if self._random.random() < 0.3:
            schema["prefixItems"] = [self.schema(depth + 1)]
        return {**schema, "items": self.schema(depth + 1)}

    def _any_of(self, depth: int) -> Schema:
        if self._random.random() < 0.5:
            return {"anyOf": [self.schema(depth + 1) for _ in range(2)]}
        kinds = [{"type": "null"}, {"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]
        return {"oneOf": self._random.sample(kinds, 2)}

    def _reference(self, depth: int = 0) -> Schema:
        del depth
        self.names.append(f"d{len(self.names)}")
        return {"$ref": f"#/$defs/{self.names[-1]}"}

    def _string(self) -> Schema:
        kind = self._random.randrange(4)
        if kind == 0:
            return {"type": "string", "format": self._random.choice(_FORMATS)}
        if kind == 1:
            return {"type": "string", "pattern": self._random.choice(_PATTERNS), "maxLength": 12}
        least = self._random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 5)}

    def _number(self) -> Schema:
        low = round(self._random.uniform(-100, 100), 2)
        return {"type": "number", "minimum": low, "maximum": low + self._random.randint(1, 1000)}

    def _integer(self) -> Schema:
        low = self._random.randint(-1000, 1000)
        bound = self._random.choice(["maximum", "exclusiveMaximum"])
        schema: Schema = {"type": "integer", "minimum": low, bound: low + self._random.randint(12, 500)}
        return {**schema, "multipleOf": self._random.choice([2, 3, 5])} if self._random.random() < 0.3 else schema

    def _enum(self) -> Schema:
        values = [1, -2.5, "one", "two", True, None, ["a"], {"k": 0}, 'a "quote"', "\u2028"]
        return {"enum": self._random.sample(values, self._random.randint(1, 4))}

    def _plain(self) -> Schema:
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"], "integer"])}
