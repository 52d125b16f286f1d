import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.engine.adapters import Adapter, AdapterRegistry
from llm_serving.errors import ModelError
from support.adapter_factories import write_adapter
from support.fakes import DEMO_SPEC


def test_registry_finds_changed_and_removed_files(tmp_path: Path) -> None:
    for name in "abc":
        write_adapter(tmp_path / name, DEMO_SPEC, targets=("q_proj",), seed=ord(name))
    lora = LoraConfig(lora_modules={name: tmp_path / name for name in "abc"})
    registry = AdapterRegistry(ServingConfig(lora=lora), DEMO_SPEC)
    (tmp_path / "b" / "adapter_model.safetensors").unlink()
    shutil.copytree(tmp_path / "a", tmp_path / "c", dirs_exist_ok=True)
    found = [registry.find_changed(registry.by_name[name].number) for name in "abc"]
    assert [[each.name for each in adapters] for adapters in found] == [[], ["b"], ["c"]]


def test_a_model_without_slots_gets_no_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_SPEC, targets=("q_proj",))
    with pytest.raises(ModelError, match="or `lora_modules` must be given"):
        AdapterRegistry(ServingConfig(), DEMO_SPEC).read("a", tmp_path)


def test_registry_refuses_an_adapter_with_the_number_of_another_one() -> None:
    config = SimpleNamespace(
        lora=SimpleNamespace(lora_modules=None, max_adapters=4), model=SimpleNamespace(model_dtype="")
    )
    registry = AdapterRegistry(config, SimpleNamespace())  # type: ignore[arg-type]
    first, second = (Adapter(name, Path(name), "0123abcd" + name * 56) for name in "ab")
    registry.add(first)
    assert first.number == second.number
    registry.add(Adapter("same", Path("same"), first.fingerprint))
    for _ in range(2):
        with pytest.raises(ModelError, match="the adapter b must not have the number 19114958 of an adapter that was"):
            registry.add(second)
        registry.remove("a")
        registry.remove("same")
