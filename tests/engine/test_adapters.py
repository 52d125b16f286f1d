import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.core.files import open_regular
from llm_serving.engine import control
from llm_serving.engine.adapters import Adapter, AdapterRegistry
from llm_serving.errors import ModelError
from llm_serving.formats import peft, safetensors
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
    with pytest.raises(ModelError, match=r"or `lora_config\.lora_modules` to enable them"):
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
        with pytest.raises(ModelError, match="the adapter b has the number 19114958, which belongs to an adapter"):
            registry.add(second)
        registry.remove("a")
        registry.remove("same")


def test_a_replica_that_joins_gets_a_removed_adapter_until_its_last_request_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "DROP_DELAY_S", 0)
    write_adapter(tmp_path, DEMO_SPEC, targets=("q_proj",))
    registry = AdapterRegistry(ServingConfig(lora=LoraConfig(lora_modules={"a": tmp_path})), DEMO_SPEC)
    adapter = registry.by_name["a"]
    told: list[tuple[int, str]] = []
    replicas = SimpleNamespace(engines={0: SimpleNamespace(set_adapter=lambda *given: told.append(given))})
    requests = SimpleNamespace(by_id={"x": SimpleNamespace(request=SimpleNamespace(adapter=adapter.number))})
    dispatcher: Any = SimpleNamespace(replicas=replicas, requests=requests, queue=None)
    lookup: Any = None
    operations = control.Control(ServingConfig(), lookup, dispatcher)

    async def run() -> None:
        assert registry.remove("a") is adapter
        assert operations.drop_adapter(registry, adapter) == 1
        assert not registry.is_offered(adapter.number)
        assert registry.folders == {adapter.number: str(tmp_path)}
        await asyncio.sleep(0)
        assert not told
        requests.by_id.clear()
        while not told:
            await asyncio.sleep(0)
        assert told == [(adapter.number, "")]
        assert not registry.folders

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_adapter_that_is_replaced_while_its_files_are_read_stays_loaded(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(lora=SimpleNamespace(lora_modules=None, max_adapters=4))
    registry = AdapterRegistry(config, SimpleNamespace())  # type: ignore[arg-type]
    before, after = (Adapter("a", tmp_path / name, digit * 64) for name, digit in (("gone", "1"), ("new", "2")))
    registry.add(before)
    calls: list[tuple[int, str]] = []
    replicas = SimpleNamespace(engines={0: SimpleNamespace(set_adapter=lambda *given: calls.append(given))})
    dispatcher: Any = SimpleNamespace(replicas=replicas, requests=SimpleNamespace(by_id={}), queue=None)
    lookup: Any = None
    operations = control.Control(ServingConfig(), lookup, dispatcher)

    async def run() -> None:
        operations.check_adapter(registry, before.number)
        await asyncio.sleep(0)  # a thread reads the files of `before`
        registry.remove("a")
        operations.drop_adapter(registry, before)
        registry.add(after)
        await asyncio.gather(*operations._checks)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert registry.by_name == {"a": after}
    assert calls == [(before.number, "")]


def test_the_file_of_an_adapter_is_opened_twice_and_its_fingerprint_is_that_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the header, once for everything."""
    write_adapter(tmp_path, DEMO_SPEC)
    opened: list[str] = []
    for module in (peft, safetensors):
        monkeypatch.setattr(module, "open_regular", lambda path: opened.append(path.name) or open_regular(path))
    adapter = peft.read_adapter(tmp_path)
    assert opened == ["adapter_model.safetensors"] * 2
    assert adapter.fingerprint == peft.fingerprint(tmp_path)
    assert not any(isinstance(array, np.memmap) for each in adapter.modules.values() for array in (each.a, each.b))
