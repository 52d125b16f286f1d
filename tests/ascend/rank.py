"""One rank of a replica on the Ascend device of the stubs: it joins the others, exchanges numbers with each of them,
computes sums, loads a model sharded over the ranks, runs a step, and prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
from ascend.device import MARK


def main(rank: int, num_ranks: int, port: int, folder: str) -> None:
    """`port`: where the ranks find each other. `folder`: of the model."""
    import mindspore as ms
    import numpy as np
    from llm_serving.backends.ascend_cells import AscendUnorderedSum
    from llm_serving.config.schema import ServingConfig
    from llm_serving.config.sections.device import CacheConfig, DeviceConfig
    from llm_serving.config.sections.model import ModelConfig
    from llm_serving.executor.supervisor import load_settings
    from llm_serving.worker.loading import load_runner
    from mindspore import nn, ops

    model = ModelConfig(model_path=Path(folder), model_dtype="float16", max_generate_length=256, decode_batch_size=4)
    config = ServingConfig(model=model, device=DeviceConfig(device_target="Ascend"), pa=CacheConfig(num_blocks=64))
    settings = msgspec.structs.replace(load_settings(config, 0), rank=rank, num_ranks=num_ranks, device_id=rank)
    runner, _ = load_runner(settings, lambda text: None, group_port=port)
    assert runner._ranks is not None

    class Gather(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.gather = ops.AllGather()

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return self.gather(x)

    parts = {name: np.array([[rank + 1, 0.5 * rank, -3 * rank]]).astype(name) for name in ("float32", "float16")}
    found = {
        "exchanged": runner._ranks.exchange([rank, 10 * rank]),
        "gathered": {name: Gather()(ms.Tensor(part)).asnumpy().tolist() for name, part in parts.items()},
        "sums": {name: AscendUnorderedSum()(ms.Tensor(part)).asnumpy().tolist() for name, part in parts.items()},
        "kv_heads": [int(cache.shape[2]) for cache in runner.kv_tensors.layers[0]],
    }
    sys.stdout.write(f"\n{MARK}{json.dumps(found)}\n")
    sys.stdout.flush()
