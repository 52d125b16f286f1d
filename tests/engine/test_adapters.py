from pathlib import Path
from types import SimpleNamespace

import pytest
from llm_serving.engine.adapters import Adapter, AdapterRegistry
from llm_serving.errors import ModelError


def test_registry_refuses_an_adapter_with_the_number_of_another_one() -> None:
    config = SimpleNamespace(
        lora=SimpleNamespace(lora_modules=None, max_adapters=4), model=SimpleNamespace(model_dtype="")
    )
    registry = AdapterRegistry(config, SimpleNamespace())  # type: ignore[arg-type]
    first, second = (Adapter(name, Path(name), "0123abcd" + name * 56) for name in "ab")
    registry.add(first)
    assert first.number == second.number
    with pytest.raises(ModelError, match="the adapter b must not have the number 19114958 of the adapter a"):
        registry.add(second)
    registry.add(Adapter("same", Path("same"), first.fingerprint))
