"""`llm-serving export`: write the graphs of a model as MINDIR files, for the backend `ge`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from llm_serving.cli.arguments import add_config_arguments, load_servable, say
from llm_serving.errors import ConfigError

from llm_serving_tools.new_folder import check_absent, new_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, metavar="OUT", help="folder that does not exist")
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = load_servable(arguments)
    check_absent(arguments.target)
    num_blocks, folder = config.pa.num_blocks, config.model.folder
    if num_blocks is None:
        raise ConfigError(
            "`pa_config.num_blocks` must be given, because the graph contains a KV cache of fixed size. Given: None"
        )
    import mindspore as ms
    from llm_serving.backends import create_backend
    from llm_serving.models.weight_reader import check_folder
    from llm_serving.worker.kv_cache import KVTensors

    from llm_serving_tools.mindir import export

    ms.set_device("CPU")  # an export must not use an NPU, even if one is visible
    spec, backend = check_folder(folder), create_backend("ascend", config.model.model_dtype)
    num_ranks = config.cluster.tensor_parallel
    ranks = [spec.of_rank(rank, num_ranks) for rank in range(num_ranks)]
    cache_bytes = num_blocks * config.pa.block_size * sum(each.kv_bytes_per_token(2) for each in ranks)
    with new_folder(arguments.target, 2 * sum(each.num_weight_elements for each in ranks) + cache_bytes) as written:
        for rank, each in enumerate(ranks):
            os.environ.update(RANK_SIZE=str(num_ranks), RANK_ID=str(rank))  # MindSpore's collectives read these
            of_rank = written if num_ranks == 1 else written / f"rank_{rank}"
            of_rank.mkdir(exist_ok=True)
            caches = KVTensors.allocate(each, backend, num_blocks, config.pa.block_size).layers
            export(each, backend, folder, of_rank, caches, config.model.max_generate_length, config.quant.weights)
    say(f"{arguments.target}: done")
    return 0
