"""A model family costs one short file and one line of the registry."""

import re
from pathlib import Path

import llm_serving
import pytest
from llm_serving.models import registry
from llm_serving.models.registry import FAMILIES

PACKAGE = Path(llm_serving.__file__).parent
MODULES = sorted({module for module, _ in FAMILIES.values()})
MAY_NAME_FAMILIES = ("models", "network", "lowering", "backends", "kernels")
NAMES_OF_OTHERS = {
    "config/sections/model.py": {"LlamaForCausalLM"},  # the documentation of `mindformers-legacy` names its class
}
"""File -> architecture names in its documentation."""


@pytest.mark.parametrize("module", MODULES)
def test_family_has_at_most_130_lines(module):
    assert len((PACKAGE / "models" / f"{module}.py").read_text().splitlines()) <= 130


def test_family_has_one_line_of_the_registry_for_each_name():
    lines = Path(registry.__file__).read_text().splitlines()
    entries = [line for line in lines if re.fullmatch(r' {4}"\w+": \("\w+", "\w+"\),', line)]
    assert len(entries) == len(FAMILIES)


def test_other_packages_name_no_family():
    """They neither contain the name of an architecture nor import the module of a family."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels" / "csrc").glob("*.*")]):
        where = path.relative_to(PACKAGE)
        content = path.read_text()
        named = set(re.findall(r"\w+", content)) & set(FAMILIES)
        if path.suffix == ".py":
            imported = re.findall(r"^\s*from (\S+) import\b", content, re.MULTILINE)
            named |= {each for each in imported if each.removeprefix("llm_serving.models.") in MODULES}
        if named and where.parts[0] not in MAY_NAME_FAMILIES:
            found[str(where)] = named
        assert not named or path.suffix == ".py", f"{where}: kernels know operations, not families"
    assert found == NAMES_OF_OTHERS
