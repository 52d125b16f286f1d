"""With groups of layers, layers with a window free their blocks while others keep theirs."""

from __future__ import annotations

import pytest
from llm_serving.core.request import Request
from llm_serving.core.window import CacheGroups, LayerWindow
from llm_serving.kvcache import BlockManager
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.transfer_pool import TransferPool
from llm_serving.network.caches import MAX_GROUPS, CacheLayout, CacheShape, grouped
from support.factories import create_request, create_scheduler
from support.scheduler_run import SchedulerRun

WINDOWS = (LayerWindow(), LayerWindow(6), LayerWindow(8, is_chunked=True))
"""Blocks have 4 tokens."""


def manager(num_blocks: int = 60, **options: object) -> BlockManager:
    return BlockManager(num_blocks, 4, groups=CacheGroups.of(WINDOWS, 8, 1000), **options)


def computed(blocks: BlockManager, num_tokens: int, request_id: str = "a") -> Request:
    """Admit a request, and compute its prompt in steps of 8 tokens."""
    request = create_request(num_tokens, request_id=request_id)
    request.num_computed_tokens = request.num_confirmed_tokens = blocks.admit(request, num_tokens)
    while request.num_computed_tokens < num_tokens:
        blocks.free_outside_window(request_id, request.num_computed_tokens)
        blocks.grow(request_id, num_tokens)
        room = blocks.num_tokens_with_blocks(request_id)
        request.num_computed_tokens = min(num_tokens, room, request.num_computed_tokens + 8)
        blocks.cache_full_blocks(request, request.num_computed_tokens)
        request.num_confirmed_tokens = request.num_computed_tokens
        blocks.check_integrity()
    blocks.free_outside_window(request_id, num_tokens)
    return request


def test_layers_without_a_window_keep_all_blocks() -> None:
    blocks = manager()
    computed(blocks, 46)
    whole, window, chunk = blocks.tables["a"]
    assert (whole.start, whole.end) == (0, 12)
    assert (window.start, window.end) == (10, 12), "token 46 sees from token 41 on"
    assert (chunk.start, chunk.end) == (10, 12), "its chunk begins at token 40"
    assert blocks.num_blocks_held("a") == 12 + 2 + 2
    blocks.free("a")
    assert blocks.pool.num_used_blocks == 0


def test_a_hit_needs_the_blocks_of_every_window() -> None:
    blocks = manager(num_blocks=200)
    computed(blocks, 41)
    table = blocks.tables["a"][1]
    lost, kept = table.ids[-2], blocks.block_table("a")
    blocks.free("a")
    blocks.pool.forget_hash(lost)
    request = create_request(45, request_id="again")
    found = blocks.admit(request, 45)
    assert found == 36, "the block of tokens 36 to 39 is missing in the group of the window"
    assert blocks.block_table("again")[:9] == kept[:9]
    assert [each.start for each in blocks.tables["again"]] == [0, 7, 8]


def test_chunks_need_no_block_where_a_chunk_begins() -> None:
    blocks = manager(num_blocks=200)
    computed(blocks, 41)
    blocks.free("a")
    request = create_request(45, request_id="again")
    assert blocks.admit(request, 45) == 40
    assert [each.start for each in blocks.tables["again"]] == [0, 8, 10]


def test_blocks_that_a_window_has_passed_are_used_first() -> None:
    """The prefix of another request survives a prompt that passes more blocks than are free."""
    blocks = manager(num_blocks=56)
    computed(blocks, 21, "short")
    blocks.free("short")
    long = create_request(121, request_id="long")
    long.cache_salt = "other"
    long.num_computed_tokens = long.num_confirmed_tokens = blocks.admit(long, 121)
    while long.num_computed_tokens < 121:
        blocks.free_outside_window("long", long.num_computed_tokens)
        blocks.grow("long", 121)
        long.num_computed_tokens = min(121, long.num_computed_tokens + 8)
        blocks.cache_full_blocks(long, long.num_computed_tokens)
        long.num_confirmed_tokens = long.num_computed_tokens
    assert blocks.pool.num_touched_blocks == 56, "all blocks were used"
    assert blocks.num_prefix_hit_tokens(create_request(25, request_id="again")) == 20


def test_early_blocks_are_allocated_after_those_without_a_hash() -> None:
    pool = BlockPool(4)
    first, second, third, fourth = pool.allocate(4)
    for block_id in (first, second, third):
        pool.register_hash(block_id, pool.epoch(block_id), bytes([block_id]))
    pool.free([first])
    pool.free([second, third], early=True)
    pool.free([fourth], early=True)
    pool.add_references([third])
    pool.free([third], early=True)
    pool.check_integrity([])
    assert [pool.allocate(1) for _ in range(4)] == [[fourth], [second], [third], [first]]


def test_more_long_requests_run_at_once() -> None:
    """Of 6 layers, one sees all tokens: groups of one layer let three times as many requests of 200 tokens run."""
    running = []
    for windows, num_blocks in (((LayerWindow(),), 120), ((LayerWindow(), *(LayerWindow(8),) * 5), 720)):
        scheduler = create_scheduler(windows=windows, num_blocks=num_blocks, max_num_batched_tokens=16)
        run = SchedulerRun(scheduler)
        run.add(*(create_request(200, max_tokens=30, seed=seed) for seed in range(9)))
        most = 0
        for _ in range(150):
            run.step()
            most = max(most, len(scheduler.running))
        run.finish()
        assert not any(each.num_preemptions for each in run.requests)
        running.append(most)
    assert running[1] >= 3 * running[0]


SHAPE = CacheShape(1, 64, 64)


def layout(num_layers: int, every: int, window: int, max_model_len: int = 32768) -> CacheLayout:
    windows = [LayerWindow() if layer % every == every - 1 else LayerWindow(window) for layer in range(num_layers)]
    return grouped([SHAPE] * num_layers, windows, max_model_len)


@pytest.mark.parametrize(
    ("model", "num_groups", "size"),
    [
        ((26, 6, 512), 7, 4),
        ((48, 6, 1024), 6, 8),
        ((24, 2, 128), 2, 12),
        ((48, 4, 8192), 4, 12),
        ((62, 6, 1024), 7, 10),
    ],
)
def test_group_sizes_of_models(model: tuple[int, int, int], num_groups: int, size: int) -> None:
    found = layout(*model)
    assert (len(found.windows), len(found.shapes)) == (num_groups, size)
    assert num_groups <= MAX_GROUPS
    assert len(set(found.layer_tensors)) == len(found.layer_tensors), "two layers share their tensors"
    assert [found.windows[group].num_tokens for group, _ in found.layer_tensors] == [
        0 if layer % model[1] == model[1] - 1 else model[2] for layer in range(model[0])
    ]


def test_windows_that_never_slide_form_no_group() -> None:
    assert len(layout(48, 4, 8192, max_model_len=8192).windows) == 1


@pytest.mark.parametrize(
    ("model", "large", "small", "num_groups", "size"),
    [
        ((60, 6, 1024), CacheShape(16, 256, 256), CacheShape(4, 512, 512), 8, 8),
        ((24, 6, 512), CacheShape(2, 512, 512), CacheShape(2, 256, 256), 7, 2),
    ],
    ids=["Gemma 4 31B", "Gemma 4 E4B"],
)
def test_smaller_layers_share_rows_of_tensors(
    model: tuple[int, int, int], large: CacheShape, small: CacheShape, num_groups: int, size: int
) -> None:
    """The layers of all tokens have the wider heads. Two layers of the smaller shape fit into a row."""
    num_layers, every, window = model
    is_full = [layer % every == every - 1 for layer in range(num_layers)]
    of_full, of_windows = (large, small) if large.key_width > small.key_width else (small, large)
    shapes = [of_full if each else of_windows for each in is_full]
    found = grouped(shapes, [LayerWindow(0 if each else window) for each in is_full], 32768)
    assert (len(found.windows), found.shapes) == (num_groups, (large,) * size)
    caches = [*found.shapes, *(each.shape for each in found.views)]
    places = set()
    for shape, each, (group, cache) in zip(shapes, is_full, found.layer_tensors, strict=True):
        assert (found.windows[group].num_tokens == 0) == each
        assert caches[cache] == shape
        assert found.group_parts[group] == (1 if shape == large else 2)
        view = found.views[cache - size] if cache >= size else None
        places.add((group, cache, 0) if view is None else (group, view.tensors, view.part))
    assert len(places) == num_layers, "two layers share their memory"
    held = [32768 if each.num_tokens == 0 else window for each in found.windows]
    of_one_group = 32768 * sum(each.num_elements for each in shapes)
    assert sum(held) * size * large.num_elements < of_one_group / 2


def test_layers_whose_shapes_do_not_divide_each_other_form_one_group() -> None:
    shapes = [CacheShape(3, 64, 64), CacheShape(2, 64, 64)]
    found = grouped(shapes, [LayerWindow(), LayerWindow(64)], 1000)
    assert found.windows == (LayerWindow(),)
    assert found.shapes == tuple(shapes)


def test_a_migration_copies_what_each_group_still_needs() -> None:
    """The importing replica has the same groups, so the numbers of tokens tell which block belongs where."""
    exporting, importing = manager(exports=TransferPool(40)), manager()
    request = computed(exporting, 46)
    moves = exporting.export("a", 46)
    assert moves is not None
    transfer = exporting.transfer_pool.hand_over("a")
    tables = exporting.tables["a"]
    needed = [block for table, start in zip(tables, (0, 10, 10), strict=True) for block in table.ids[start:]]
    assert [move.source for move in moves] == needed
    importing.add_import("a", transfer)
    assert importing.num_blocks_to_admit(request, 47) == 12 + 2 + 2
    assert importing.admit(request, 47) == 46
    imported = importing.pop_block_moves()
    assert [move.source for move in imported] == [move.target for move in moves]
    targets = [block for table in importing.tables["a"] for block in table.ids[table.start :]]
    assert [move.target for move in imported] == targets
    assert [each.start for each in importing.tables["a"]] == [0, 10, 10]
    importing.check_integrity()


def test_a_swap_copies_what_each_group_still_needs() -> None:
    blocks = manager(num_swap_blocks=16)
    request = computed(blocks, 46)
    assert blocks.num_blocks_to_swap(request) == 12 + 2 + 2
    blocks.swap_out(request)
    assert blocks.pool.num_used_blocks == 0
    assert blocks.num_blocks_to_admit(request, 47) == 16
    assert blocks.admit(request, 47) == 46
    assert [each.start for each in blocks.tables["a"]] == [0, 10, 10]
    blocks.check_integrity()
