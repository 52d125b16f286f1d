"""One replica put together: scheduler, blocks and engine around an executor."""

from __future__ import annotations

from llm_serving.config.schema import ServingConfig
from llm_serving.engine.engine import Engine, Publish
from llm_serving.engine.executor import Executor
from llm_serving.engine.metrics import Metrics
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.kvcache import BlockManager
from llm_serving.log import get_logger
from llm_serving.scheduler import Scheduler, SchedulerLimits
from llm_serving.scheduler.policy import POLICIES

logger = get_logger(__name__)


def build_scheduler(config: ServingConfig, num_blocks: int) -> Scheduler:
    """The scheduler that the configuration asks for, over a cache of `num_blocks`."""
    limits = SchedulerLimits(
        max_num_batched_tokens=config.scheduler.max_prefill_tokens,
        max_num_seqs=config.model.decode_batch_size,
        max_prefill_seqs=config.model.prefill_batch_size or config.model.decode_batch_size,
        max_decode_gap=config.scheduler.max_consecutive_prefill_steps,
        max_preemptions=config.scheduler.max_preemptions_per_request,
        static_batching=config.model.batching_strategy == "static",
        batch_waiting_time=config.model.batch_waiting_time,
    )
    policy = POLICIES[config.scheduler.policy](config.scheduler)
    return Scheduler(limits, policy, BlockManager(num_blocks, config.pa.block_size))


def build_engine(
    config: ServingConfig,
    num_blocks: int,
    executor: Executor,
    tokenizer: Tokenizer,
    metrics: Metrics,
    publish: Publish,
    index: int = 0,
) -> Engine:
    """The engine of replica `index`; its executor's WorkAgent has a cache of `num_blocks`."""
    scheduler = build_scheduler(config, num_blocks)
    logger.info("replica %d: %d blocks of %d tokens; %s", index, num_blocks, config.pa.block_size, scheduler.bounds())
    steps = 2 if config.scheduler.schedule_ahead else 1
    return Engine(scheduler, executor, tokenizer, metrics, publish, index=index, max_steps_in_flight=steps)
