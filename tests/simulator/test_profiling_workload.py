from llm_serving_simulator.commands.profile import ServerLimits, larger_phases, phases


def test_profiling_requests_fit_the_server():
    limits = ServerLimits(num_slots=12, max_len=200, num_cached=640, vocab_size=50)
    found = phases(limits)
    assert [each.name for each in found][3:7] == ["2 clients", "4 clients", "8 clients", "12 clients"]
    for phase in found:
        for asked in phase.workload.streams[0].requests:
            assert 1 <= len(asked.prompt_token_ids) + asked.num_output_tokens <= 200
            assert asked.num_output_tokens >= 1
            assert all(3 <= token < 50 for token in asked.prompt_token_ids)


def test_profiling_has_phases_for_the_smallest_server():
    for phase in phases(ServerLimits(1, 8, 8, 16)):
        assert phase.workload.streams[0].requests[0].num_output_tokens >= 1


def test_profiling_requests_depend_on_the_seed():
    limits = ServerLimits(2, 64, 640, 50)
    first, again, other = (phases(limits, seed)[3].workload.streams[0].requests[:9] for seed in (1, 1, 2))
    assert first == again != other


def test_profiling_includes_larger_steps_up_to_the_largest():
    limits = ServerLimits(num_slots=256, max_len=1024, num_cached=16384, vocab_size=50)
    found = larger_phases(limits, 4096, limits._replace(num_slots=128), 512)
    names = [each.name for each in found[1:]]
    prompts = [f"prompts, {size} tokens a step" for size in (1024, 2048, 4096)]
    assert names == ["256 clients", "256 clients, short prompts", "full cache", *prompts]
    for phase, size in zip(found[4:], (1024, 2048, 4096), strict=True):
        stream = phase.workload.streams[0]
        asked = sum(len(each.prompt_token_ids) for each in stream.requests[: stream.concurrency // 2])
        assert size / 2 < asked < 2 * size
    for phase in found:
        for asked in phase.workload.streams[0].requests:
            assert 2 <= len(asked.prompt_token_ids) + asked.num_output_tokens <= 1024
    assert [each.name for each in larger_phases(limits, 600, limits, 512)[1:]] == [
        "full cache",
        "prompts, 600 tokens a step",
    ]


def test_profiling_of_many_clients_includes_decode_only_steps():
    """The prompts fit one step, and the answers are decoded together."""
    limits = ServerLimits(num_slots=64, max_len=1024, num_cached=16384, vocab_size=50)
    found = [each for each in phases(limits) if each.name.endswith("short prompts")]
    assert [each.name for each in found] == [f"{count} clients, short prompts" for count in (16, 32, 64)] * 2
    for phase in found:
        (stream,) = phase.workload.streams
        assert sum(len(each.prompt_token_ids) for each in stream.requests[: stream.concurrency]) <= 512
        assert {each.num_output_tokens for each in stream.requests} == {128}


def test_profiling_of_few_clients_repeats_requests_for_drafts():
    found = [each for each in phases(ServerLimits(4, 256, 1024, 50)) if each.name.endswith("the same again")]
    assert [each.name.split()[0] for each in found] == ["1", "2", "4"] * 2
    for phase in found:
        (stream,) = phase.workload.streams
        prompts = [tuple(each.prompt_token_ids) for each in stream.requests]
        assert len(set(prompts)) == stream.concurrency
        assert prompts[: stream.concurrency] == prompts[stream.concurrency : 2 * stream.concurrency]
        assert all(each.num_output_tokens == 96 for each in stream.requests)
