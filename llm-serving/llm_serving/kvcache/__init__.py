"""Which block of the key/value cache belongs to whom: plain bookkeeping, no tensors."""

from llm_serving.kvcache.block_manager import BlockManager
from llm_serving.kvcache.block_pool import BlockPool

__all__ = ["BlockManager", "BlockPool"]
