"""Section `pa_config`."""

from dataclasses import dataclass

from llm_serving.config.rules import integer, option


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Section `pa_config`: the paged KV cache."""

    num_blocks: int | None = option(None, integer(1))
    """Blocks of each WorkAgent's KV cache. None: the WorkAgent chooses from the memory it may use."""

    block_size: int = option(16, integer(1, 1024))
    """Tokens of one block; a multiple of 16, except with `kernels: plain`."""

    num_swap_blocks: int = option(0, integer(0))
    """Blocks of each WorkAgent's host pool, where preempted requests wait when `preemption_mode` swaps. 0: none."""

    decode_seq_length: int | None = option(None, integer(1))
    """Tokens. Older files repeat `max_generate_length` here; it limits nothing, a smaller value earns a notice."""
