"""Which requests wait for the disk cache. tests/end_to_end/test_disk_cache.py tests real files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.engine import disk_cache
from llm_serving.engine.disk_cache import DiskCache


@pytest.mark.parametrize("parts", [{"adapter": 3}, {"beam_search": BeamSearchParams(width=2, num_returned=1)}])
def test_requests_with_beams_or_an_adapter_do_not_use_the_disk_cache(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any]
) -> None:
    added: list[Request] = []
    monkeypatch.setattr(disk_cache, "attach_sink", lambda request, context: added.append(request))
    request = Request("a", [1, 2, 3], SamplingParams(max_tokens=4), **parts)
    DiskCache.attach_sink(SimpleNamespace(), request, SimpleNamespace())  # type: ignore[arg-type]
    assert added == [request]
