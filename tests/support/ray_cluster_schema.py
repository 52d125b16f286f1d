"""KubeRay's schema of the fields that `docs/deploy/kuberay.yaml` has: `ray_cluster_schema.json`.

    python tests/support/ray_cluster_schema.py ray.io_rayclusters.yaml > tests/support/ray_cluster_schema.json

The argument is `ray-operator/config/crd/bases/ray.io_rayclusters.yaml` of https://github.com/ray-project/kuberay
(Apache License 2.0, commit feeaf72), which has 0.9 MB. For every object of the manifest the extract keeps the names of
all fields, so that unknown fields are refused, and for the fields in the manifest their types and which are required.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

MANIFEST = Path(__file__).resolve().parents[2] / "docs" / "deploy" / "kuberay.yaml"
VERSION = "v1"
KEPT = ("type", "required", "enum", "pattern", "minimum", "maximum", "anyOf")
Schema = dict[str, Any]


def pruned(schema: Schema, values: list[Any]) -> Schema:
    """Return the parts of a schema that apply to these values."""
    kept: Schema = {name: schema[name] for name in KEPT if name in schema}
    if "properties" in schema:
        used = {name: [value[name] for value in values if name in value] for name in schema["properties"]}
        kept["properties"] = {
            name: pruned(each, used[name]) if used[name] else {} for name, each in schema["properties"].items()
        }
        kept["additionalProperties"] = False
    elif isinstance(more := schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = pruned(more, [each for value in values for each in value.values()])
    elif "items" in schema:
        kept["items"] = pruned(schema["items"], [each for value in values for each in value])
    return kept


def main() -> None:
    definition = yaml.safe_load(Path(sys.argv[1]).read_text())
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == VERSION)
    cluster = next(yaml.safe_load_all(MANIFEST.read_text()))
    schema = pruned(version["schema"]["openAPIV3Schema"], [cluster])
    sys.stdout.write(f"{json.dumps(schema, indent=1, sort_keys=True)}\n")


if __name__ == "__main__":
    main()
