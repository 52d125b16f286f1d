"""Random arrivals, aborts and ends: every request ends, blocks are conserved, bounds hold."""

from factories import create_request, create_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request import FinishReason

arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # step of arrival
        st.integers(1, 40),  # prompt tokens
        st.integers(1, 12),  # output tokens
        st.integers(-2, 2),  # priority
        st.one_of(st.none(), st.integers(0, 30)),  # step of an abort
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals,
    policy=st.sampled_from(["prefill_first", "fcfs"]),
    budget=st.integers(8, 48),
    num_blocks=st.integers(13, 40),
    ahead=st.booleans(),
    static=st.booleans(),
    max_preemptions=st.integers(0, 2),
)
def test_every_request_ends_with_what_it_asked_for(
    arrivals: list[tuple[int, int, int, int, int | None]],
    policy: str,
    budget: int,
    num_blocks: int,
    ahead: bool,
    static: bool,
    max_preemptions: int,
) -> None:
    scheduler = create_scheduler(
        policy=policy,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        static_batching=static,
        max_preemptions=max_preemptions,
    )
    pending = [
        (step, abort, create_request(prompt, max_tokens=output, priority=priority))
        for step, prompt, output, priority, abort in arrivals
    ]
    requests = [request for _, _, request in pending]
    in_flight = []
    for step in range(2000):
        for arrival, abort, request in pending:
            if arrival == step:
                scheduler.add(request)
            if abort is not None and step == arrival + abort:
                scheduler.finish(request, FinishReason.ABORT)
        schedule = scheduler.schedule(float(step))
        if schedule is not None:
            in_flight.append(schedule)
            assert schedule.num_tokens <= budget
            assert schedule.num_bound_violations == 0
            assert len({id(row.request) for row in schedule.rows}) == len(schedule.rows)
        if in_flight and (schedule is None or len(in_flight) > ahead):
            done = in_flight.pop(0)
            scheduler.update(done, [7] * sum(row.samples for row in done.rows))
        scheduler.check_integrity()
        if step > 50 and not scheduler.has_unfinished_requests and not in_flight:
            break
    assert scheduler.blocks.pool.num_used_blocks == 0
    for request in requests:
        assert request.is_finished
        assert request.num_preemptions <= max_preemptions
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.output_token_ids) == request.sampling.max_tokens
