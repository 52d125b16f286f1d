"""Bookkeeping of the KV cache: which request holds which block. It contains no tensors."""

from llm_serving.kvcache.block_manager import BlockManager
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.state_slots import StateSlots

__all__ = ["BlockManager", "BlockPool", "StateSlots"]
