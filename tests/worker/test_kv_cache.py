"""KV tensors, the host pool, and block moves."""

import functools

import numpy as np
import psutil
import pytest
from llm_serving.core.step import BlockMoveKind
from llm_serving.errors import ConfigError, ModelError, WorkerError
from llm_serving.worker.block_guard import BlockGuard, BlockTags
from llm_serving.worker.kv_cache import KVTensors, block_bytes, group_by_kind, num_blocks_for
from support.graph_model import GraphModel, backend
from support.model_factories import tiny_spec, write_model
from support.step_factories import block_moves

pytestmark = pytest.mark.mindspore

# Two layers, keys and values, two heads of 16: 128 elements per token.
SPEC = tiny_spec()


def test_every_layer_has_keys_and_values_of_every_block():
    tensors = KVTensors.allocate(SPEC, backend("cpu", "bfloat16"), num_blocks=5, block_size=16)
    assert len(tensors.layers) == 2
    for parameter in (parameter for layer in tensors.layers for parameter in layer):
        assert parameter.shape == (5, 16, 2, 16)
        assert not parameter.asnumpy().view("uint16").any()


def resident_bytes():
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("int8", [False, True])
def test_blocks_are_committed_on_first_use_and_cleared_by_returning_their_pages(int8):
    """A gigabyte of blocks. Writing a block commits a page of at most 2 MiB in each of the four tensors."""
    before = resident_bytes()
    tensors = KVTensors.allocate(
        SPEC, backend("cpu", "bfloat16"), num_blocks=2**18, block_size=16, num_swap_blocks=2**16, int8=int8
    )
    assert tensors.num_blocks * tensors.block_bytes > 2**29
    assert resident_bytes() - before < 2**25
    for cache in (cache for layer in tensors.layers for cache in layer):
        cache.storage[1000] = 1
        assert (cache.asnumpy()[1000] != 0).all()
    assert resident_bytes() - before < 2**26
    tensors.host_layers[0][0][1000] = 1
    tensors.clear()
    assert not tensors.host_layers[0][0][1000].any()
    assert not any(cache.storage[1000].any() for layer in tensors.layers for cache in layer)


def test_kv_tensor_names_are_unique():
    tensors = KVTensors.allocate(SPEC, backend("cpu", "bfloat16"), num_blocks=1, block_size=16)
    assert len({parameter.name for layer in tensors.layers for parameter in layer}) == 4


@pytest.mark.parametrize(("dtype", "element"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_block_bytes_follow_the_dtype(dtype, element):
    assert block_bytes(SPEC, backend("cpu", dtype), 16) == 16 * 128 * element


def test_plain_backend_stores_a_float32_cache():
    assert block_bytes(SPEC, backend("plain", "bfloat16"), 16) == 16 * 128 * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_blocks_have_one_byte_per_value_and_four_per_head_and_token(dtype):
    assert block_bytes(SPEC, backend("cpu", dtype), 16, int8=True) == 16 * (128 + 2 * 2 * 2 * 4)
    tensors = KVTensors.allocate(SPEC, backend("cpu", dtype), 5, 16, num_swap_blocks=3, int8=True)
    held = sum(parameter.storage.nbytes for layer in tensors.layers for parameter in layer)
    assert held == 5 * block_bytes(SPEC, backend("cpu", dtype), 16, int8=True)
    assert {host.shape for hosts in tensors.host_layers for host in hosts} == {(3, 16, 2, 20)}


@pytest.mark.parametrize(("name", "dtype"), [("plain", "bfloat16"), ("ascend", "float16")])
def test_int8_cache_is_refused_by_other_backends(name, dtype):
    with pytest.raises(ModelError, match=f"the operations of {name} do not support an int8 KV cache"):
        KVTensors.allocate(SPEC, backend(name, dtype), 5, 16, int8=True)


def test_num_blocks_for_rounds_down():
    assert num_blocks_for(3 * 4096 + 4095, 4096, 16) == 3


def test_memory_without_room_for_one_block_is_an_error():
    with pytest.raises(ConfigError, match=r"one block of 4096 bytes\. Left beside the weights: 4095 bytes"):
        num_blocks_for(4095, 4096, 16)


def numbered(tensors):
    """Fill every element of every tensor with a different value; return the tensors as arrays of the expected bytes."""
    expected = []
    for index, (cache, host) in enumerate(memories(tensors)):
        for part, memory in enumerate((cache.storage, host)):
            values = np.random.default_rng([index, part]).integers(0, 1000, memory.shape)
            memory[...] = values.astype(memory.dtype)
        expected.append((cache.storage.copy(), host.copy()))
    return expected


def memories(tensors):
    for caches, hosts in zip(tensors.layers, tensors.host_layers, strict=True):
        yield from zip(caches, hosts, strict=True)


# On a CPU, Ascend's primitive that writes blocks supports float16 only.
@pytest.mark.parametrize(
    ("name", "dtype"), [("cpu", "bfloat16"), ("cpu", "float32"), ("plain", "bfloat16"), ("ascend", "float16")]
)
@pytest.mark.parametrize("seed", range(3))
def test_blocks_move_in_the_order_given(name, dtype, seed):
    tensors = KVTensors.allocate(SPEC, backend(name, dtype), num_blocks=6, block_size=16, num_swap_blocks=4)
    expected = numbered(tensors)
    # With few blocks and many moves most sources are targets of an earlier move, and most targets are written again.
    rng = np.random.default_rng(seed)
    kinds = np.repeat(rng.integers(0, 3, 8), 5)
    sizes = {BlockMoveKind.COPY: (6, 6), BlockMoveKind.SWAP_OUT: (6, 4), BlockMoveKind.SWAP_IN: (4, 6)}
    moves = block_moves(*((kind, *rng.integers(0, sizes[BlockMoveKind(kind)])) for kind in kinds))
    tensors.move_blocks(moves)
    for (cache, host), (cache_bytes, host_bytes) in zip(memories(tensors), expected, strict=True):
        for kind, source, target in moves[:, :3].tolist():
            into = host_bytes if kind == BlockMoveKind.SWAP_OUT else cache_bytes
            into[target] = (host_bytes if kind == BlockMoveKind.SWAP_IN else cache_bytes)[source]
        np.testing.assert_array_equal(cache.asnumpy().view(cache_bytes.dtype), cache_bytes)
        np.testing.assert_array_equal(host, host_bytes)


@pytest.mark.parametrize("kind", [BlockMoveKind.SWAP_OUT, BlockMoveKind.SWAP_IN])
def test_grouped_moves_equal_single_moves(kind):
    tensors = KVTensors.allocate(SPEC, backend("cpu", "bfloat16"), num_blocks=8, block_size=16, num_swap_blocks=8)
    expected = numbered(tensors)
    up, down = [0, 1, 2, 3], [3, 2, 1, 0]
    pairs = [*zip(up, down, strict=True), *zip([4, 5, 6, 7], up, strict=True), *zip(down, [7, 6, 5, 4], strict=True)]
    pairs += [(2, 6), (7, 3), (6, 2), (5, 2), (0, 0), (1, 1)]
    tensors.move_blocks(block_moves(*((kind, source, target) for source, target in pairs)))
    for (cache, host), arrays in zip(memories(tensors), expected, strict=True):
        for source, target in pairs:
            arrays[kind == BlockMoveKind.SWAP_OUT][target] = arrays[kind != BlockMoveKind.SWAP_OUT][source]
        for memory, bytes_of_it in zip((cache.storage, host), arrays, strict=True):
            np.testing.assert_array_equal(memory, bytes_of_it)


def test_bfloat16_blocks_of_an_npu_can_be_swapped_out():
    tensors = KVTensors.allocate(SPEC, backend("ascend", "bfloat16"), num_blocks=6, block_size=16, num_swap_blocks=4)
    expected = numbered(tensors)
    tensors.move_blocks(block_moves((BlockMoveKind.SWAP_OUT, 5, 0), (BlockMoveKind.SWAP_OUT, 2, 3)))
    for (_, host), (cache_bytes, host_bytes) in zip(memories(tensors), expected, strict=True):
        np.testing.assert_array_equal(host, [cache_bytes[5], host_bytes[1], host_bytes[2], cache_bytes[2]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, SPEC)
    return folder


@pytest.fixture(scope="module")
def make_model(folder):
    """Return a function (backend name, dtype) -> model, compiled once, with zero blocks."""
    compiled = functools.cache(lambda *kind: GraphModel(SPEC, folder, backend(*kind), num_swap_blocks=4))

    def make(name, dtype):
        model = compiled(name, dtype)
        for cache, host in memories(model.kv_tensors):
            cache.storage[...] = host[...] = 0
        return model

    return make


BACKENDS = pytest.mark.parametrize(("name", "dtype"), [("cpu", "bfloat16"), ("cpu", "float32"), ("plain", "bfloat16")])
PROMPT, OTHER = (np.random.default_rng(seed).integers(0, 97, 41).tolist() for seed in (1, 2))


def decode(model, computed, blocks, count=8):
    """Return the logits of `count` tokens, one per step, after `computed` cached tokens."""
    return [model.logits(([token], computed + index, blocks)) for index, token in enumerate(range(40, 40 + count))]


@BACKENDS
def test_swapped_request_continues_with_the_same_logits(make_model, name, dtype):
    undisturbed = make_model(name, dtype)
    undisturbed.logits((PROMPT, 0, [3, 1, 7]))
    expected = decode(undisturbed, 41, [3, 1, 7, 0])

    model = make_model(name, dtype)
    move = model.kv_tensors.move_blocks
    model.logits((PROMPT, 0, [3, 1, 7]))
    move(block_moves(*((BlockMoveKind.SWAP_OUT, source, target) for source, target in ((3, 2), (1, 0), (7, 3)))))
    model.logits((OTHER, 0, [7, 3, 1]))
    move(block_moves(*((BlockMoveKind.SWAP_IN, source, target) for source, target in ((2, 5), (0, 4), (3, 9)))))
    for logits, reference in zip(decode(model, 41, [5, 4, 9, 6]), expected, strict=True):
        np.testing.assert_array_equal(logits, reference)


@BACKENDS
def test_two_sequences_continue_from_a_copied_partial_block(make_model, name, dtype):
    def reference(tokens):
        model = make_model(name, dtype)
        model.logits((PROMPT, 0, [3, 1, 7]))
        return [model.logits(([token], 41 + index, [3, 1, 7])) for index, token in enumerate(tokens)]

    first, second = [5, 6, 7, 8], [90, 80, 70, 60]
    expected = zip(reference(first), reference(second), strict=True)
    model = make_model(name, dtype)
    model.logits((PROMPT, 0, [3, 1, 7]))
    model.kv_tensors.move_blocks(block_moves((BlockMoveKind.COPY, 7, 2)))
    for index, tokens in enumerate(zip(first, second, strict=True)):
        # One request at a time, so that stock products have the same shapes as without preemption.
        for token, blocks, logits in zip(tokens, ([3, 1, 7], [3, 1, 2]), next(expected), strict=True):
            np.testing.assert_array_equal(model.logits(([token], 41 + index, blocks)), logits)


COPY, OUT, IN, TAKE = BlockMoveKind.COPY, BlockMoveKind.SWAP_OUT, BlockMoveKind.SWAP_IN, BlockMoveKind.IMPORT


def a_guard():
    return BlockGuard(num_blocks=10, num_swap_blocks=3, block_size=4, transfer=BlockTags.of_empty(4))


def test_the_last_blocks_of_cache_and_host_pool_may_move():
    a_guard().check_ids(block_moves((COPY, 9, 0), (OUT, 9, 2), (IN, 2, 9)))


def test_step_without_block_moves_needs_no_host_pool():
    BlockGuard(num_blocks=1, num_swap_blocks=0, block_size=4).check_ids(block_moves())


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (
            (COPY, 10, 0),
            r"the source of COPY must be a block of the cache with an id below `num_blocks` = 10\. Given: 10",
        ),
        (
            (COPY, 0, -1),
            r"the target of COPY must be a block of the cache with an id below `num_blocks` = 10\. Given: -1",
        ),
        (
            (OUT, 10, 0),
            r"the source of SWAP_OUT must be a block of the cache with an id below `num_blocks` = 10\. Given: 10",
        ),
        (
            (OUT, 9, 3),
            r"target of SWAP_OUT must be a block of the host pool with an id below `num_swap_blocks` = 3\. Given: 3",
        ),
        (
            (IN, 3, 9),
            r"the source of SWAP_IN must be a block of the host pool with an id below `num_swap_blocks` = 3\. Given: 3",
        ),
        (
            (IN, -1, 9),
            r"source of SWAP_IN must be a block of the host pool with an id below `num_swap_blocks` = 3\. Given: -1",
        ),
        (
            (IN, 0, 10),
            r"the target of SWAP_IN must be a block of the cache with an id below `num_blocks` = 10\. Given: 10",
        ),
        (
            (TAKE, 4, 9),
            r"the source of IMPORT must be a block of the transfer pool with an id below "
            r"`num_transfer_blocks` = 4\. Given: 4",
        ),
        ((3, 0, 0), r"of the kinds 0 COPY, 1 SWAP_OUT, 2 SWAP_IN, 4 IMPORT, 6 IMPORT_STATE\. Given: 3"),
        ((-1, 0, 0), r"of the kinds 0 COPY, 1 SWAP_OUT, 2 SWAP_IN, 4 IMPORT, 6 IMPORT_STATE\. Given: -1"),
    ],
)
def test_check_ids_names_the_wrong_move(move, message):
    good = (COPY, 1, 2)
    for moves in ([move], [good, move], [move, good]):
        with pytest.raises(WorkerError, match=message):
            a_guard().check_ids(block_moves(*moves))


def test_exports_must_stay_inside_the_transfer_pool():
    a_guard().check_ids(block_moves((BlockMoveKind.EXPORT, 9, 3)), exports=True)
    with pytest.raises(WorkerError, match="target of EXPORT must be a block of the transfer pool"):
        a_guard().check_ids(block_moves((BlockMoveKind.EXPORT, 9, 4)), exports=True)
    with pytest.raises(WorkerError, match=r"of the kinds 3 EXPORT, 5 EXPORT_STATE\. Given: 0"):
        a_guard().check_ids(block_moves((COPY, 9, 3)), exports=True)


@pytest.mark.parametrize("shape", [(6,), (1, 3), (1, 1, 6)])
def test_check_ids_rejects_another_shape(shape):
    with pytest.raises(WorkerError, match=r"block_moves must be \[N, 6\]\. Given: "):
        a_guard().check_ids(np.zeros(shape, np.int32))


def test_group_by_kind_yields_runs_of_one_kind():
    moves = block_moves((OUT, 5, 0), (OUT, 6, 1), (COPY, 5, 6), (OUT, 6, 2), (IN, 0, 7), (IN, 1, 8))
    assert [(kind, pairs.tolist()) for kind, pairs in group_by_kind(moves)] == [
        (OUT, [[5, 0], [6, 1]]),
        (COPY, [[5, 6]]),
        (OUT, [[6, 2]]),
        (IN, [[0, 7], [1, 8]]),
    ]


def test_group_by_kind_of_no_moves_is_empty():
    assert list(group_by_kind(block_moves())) == []
