from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from llm_serving.kvcache import BlockManager


def test_table_grows_block_by_block() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.grow("a", 4)
    assert blocks.block_table("a") == [0]
    blocks.grow("a", 5)
    assert blocks.block_table("a") == [0, 1]
    blocks.grow("a", 8)
    assert blocks.block_table("a") == [0, 1]


def test_free_returns_the_last_block_first() -> None:
    blocks = BlockManager(num_blocks=3, block_size=1)
    blocks.grow("a", 3)
    blocks.free("a")
    blocks.grow("b", 3)
    assert blocks.block_table("b") == [2, 1, 0]


def test_admission_keeps_the_reserve_free() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    assert blocks.can_admit(12, reserve=1)
    assert not blocks.can_admit(13, reserve=1)


def test_growing_may_use_the_last_block() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    blocks.grow("a", 4)
    assert blocks.can_grow("a", 8)
    assert not blocks.can_grow("a", 9)


def test_can_ever_hold_counts_whole_blocks() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    assert blocks.can_ever_hold(8)
    assert not blocks.can_ever_hold(9)


def test_usage_is_the_used_share() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.grow("a", 9)
    assert blocks.usage == 0.75


class BlockManagerMachine(RuleBasedStateMachine):
    """Random growth and freeing against a model that only counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(num_blocks=12, block_size=4)
        self.num_tokens: dict[str, int] = {}

    @rule(name=st.sampled_from("abcdef"), more=st.integers(1, 20))
    def grow(self, name: str, more: int) -> None:
        wanted = self.num_tokens.get(name, 0) + more
        others = sum(-(-tokens // 4) for other, tokens in self.num_tokens.items() if other != name)
        assert self.blocks.can_grow(name, wanted) == (others + -(-wanted // 4) <= 12)
        if self.blocks.can_grow(name, wanted):
            self.blocks.grow(name, wanted)
            self.num_tokens[name] = wanted

    @precondition(lambda self: self.num_tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.num_tokens)))
        self.blocks.free(name)
        del self.num_tokens[name]

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.blocks.check_integrity()
        for name, tokens in self.num_tokens.items():
            assert len(self.blocks.block_table(name)) == -(-tokens // 4)


TestBlockManagerMachine = BlockManagerMachine.TestCase
