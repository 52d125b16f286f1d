"""How much of a prompt a replica has, or will have when its turn comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from llm_serving.kvcache import BlockPool
from llm_serving.kvcache.block_hash import block_hash, namespace_hash

MAX_BLOCKS: Final = 1024
"""Of a prompt that are looked at."""


def block_names(namespace: str, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Names of the full blocks of a prompt that need not be computed where somebody has them: never its last token."""
    names: list[bytes] = []
    previous = namespace_hash(namespace)
    for index in range(min(MAX_BLOCKS, (len(token_ids) - 1) // block_size)):
        previous = block_hash(previous, token_ids[index * block_size : (index + 1) * block_size])
        names.append(previous)
    return names


class PromptBlocks:
    """Blocks of the prompts of unfinished requests, by replica.

    What is not computed yet counts like what is: who comes behind the first request with a prefix finds it computed.
    """

    def __init__(self) -> None:
        self._names: dict[str, tuple[int, Sequence[bytes]]] = {}
        """By request: its replica and its blocks."""
        self._counts: dict[int, Counter[bytes]] = {}
        self._begun: dict[bytes, Counter[int]] = {}
        """By a prompt's first block, how many requests of each replica begin with it."""

    def enter(self, request_id: str, replica: int, names: Sequence[bytes]) -> None:
        if names:
            self._names[request_id] = replica, names
            self._counts.setdefault(replica, Counter()).update(names)
            self._begun.setdefault(names[0], Counter())[replica] += 1

    def leave(self, request_id: str) -> None:
        """The request has ended; one that is not known is left alone."""
        replica, names = self._names.pop(request_id, (-1, ()))
        counts = self._counts.get(replica)
        if counts is not None:
            for name in names:
                counts[name] -= 1
                if not counts[name]:
                    del counts[name]
        if names:
            begun = self._begun[names[0]]
            begun[replica] -= 1
            if not begun[replica]:
                del begun[replica]
            if not begun:
                del self._begun[names[0]]

    def move(self, request_id: str, replica: int) -> None:
        """Another replica has the request, and with it these blocks."""
        _, names = self._names.get(request_id, (replica, ()))
        self.leave(request_id)
        self.enter(request_id, replica, names)

    def having(self, name: bytes, pools: Iterable[tuple[int, Callable[[bytes], bool]]]) -> set[int]:
        """Replicas that have the block with which a prompt begins, or are to compute it.

        Args:
            name: Of the block.
            pools: (replica, `BlockPool.has` of its cache) of those that count.
        """
        return {replica for replica, has in pools if has(name)}.union(self._begun.get(name, ()))

    def num_found(self, replica: int, names: Sequence[bytes], pool: BlockPool) -> int:
        """Of these blocks, from the first on, how many a replica has in its cache or is to compute."""
        counts = self._counts.get(replica, Counter())
        for number, name in enumerate(names):
            if name not in counts and pool.find(name) is None:
                return number
        return len(names)
