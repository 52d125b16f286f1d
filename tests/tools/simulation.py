"""A simulation of a whole master in one process under a virtual clock, with random faults drawn from a seed.

Admission control, scheduler, blocks, engine, executors and the protocol's frames are the shipping code. Threads, the
event loop, and the WorkAgents with their processes, sockets and model are simulated. A simulated WorkAgent may be slow,
hang, die before or after it computed, fail a step or a row, and answer twice, with another step's answer or with
garbage. It may read a step when it is sent, or only when the master waits. It may run on a machine that is lost, or
whose link to the master is slow or cut in one or both directions (`simulated_network.py`), also while KV blocks are
sent (`simulated_block_link.py`). Clients arrive together, are refused, and leave in any state of their request. Rules
are reloaded, and replicas leave and join (`simulated_operator.py`).

After every step the invariants of that moment are checked. At the end every request must have ended with its reference
answer (batch size 1), and no drained replica may serve.

    python tests/tools/simulation.py --seeds 100000 --processes 2 [--machines 3]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import MAX_PRIORITY, Caller, class_of
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.step import BlockMoveKind
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine
from llm_serving.engine.fleet.migration import MigratingRequest
from llm_serving.errors import CapacityError, ContextLengthError, UnavailableError, WorkerDiedError
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler.components import SchedulingRules
from support.factories import create_scheduler
from support.fake_runner import FakeTransferPool
from support.scheduler_loads import STAY
from support.simulated_agent import BAD_ROW, POISON
from support.simulated_block_link import SimulatedCarrier
from support.simulated_client import ANYWHERE, MAX_MODEL_LEN, Client, draw_clients
from support.simulated_clock import Clock
from support.simulated_operator import Operator
from support.simulated_replica import TOKENIZER, EventLoop, Replica
from support.simulated_settings import draw_cluster, draw_config, draw_network, draw_reloads, draw_scheduler

MAX_ROUNDS = 4000
PRIORITIES = (-MAX_PRIORITY, -1, 0, 1, MAX_PRIORITY)
SEEDS_PER_SHARE = 50
MODEL: Any = SimpleNamespace(vocab_size=POISON + 1, eos_token_ids=())


class Simulation:
    """A configuration, a workload and the faults of all steps, drawn from one seed."""

    def __init__(self, seed: int, num_machines: int | None = None) -> None:
        """Draw everything in a fixed order.

        Args:
            seed: Seed of all random generators.
            num_machines: Machines with WorkAgents, each of which may have a replica; 0: the master's; None: drawn.
        """
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        self.totals = Totals()
        self._round = 0
        scheduler = draw_scheduler(rng)
        self.network = draw_network(random.Random(f"network {seed}"), self.clock, num_machines)
        config = draw_config(rng, scheduler)
        num_replicas = rng.choice((1, 1, 1, 2))
        if num_machines:
            num_replicas = random.Random(f"replicas {seed}").randint(1, num_machines)
        self._cluster = draw_cluster(random.Random(f"roles {seed}"), config, num_replicas)
        num_replicas = self._cluster.replicas
        self._config = config = replace(config, cluster=self._cluster)
        self.num_transfer_blocks = config.num_transfer_blocks
        self.transfer = FakeTransferPool(self.num_transfer_blocks * config.num_replicas)
        self.metrics = Metrics(classes=config.request_classes)
        self._loop = EventLoop()
        self._master = AsyncEngine(
            config, MODEL, TOKENIZER, self.metrics, lambda *_: contextlib.nullcontext(), clock=self.clock
        )
        self._master.replicas._loop = self._loop  # type: ignore[assignment]
        self._publish_migrating = self._master.replicas.on_migrating
        self._master.replicas.on_migrating = self._depart  # type: ignore[method-assign]
        self._exported_by: dict[TransferBlock, str] = {}
        """The request that exported each block, by (block, epoch)."""
        self._carrier = SimulatedCarrier(random.Random(f"carrier {seed}").choice((1, 2, 100)))
        self._master.replicas._transferrer = self._carrier  # type: ignore[assignment]
        self._shared = {"num_schedulers": num_replicas}
        self._scheduler = scheduler
        self._newest_rules: dict[str, Any] | None = None
        """Options of the reloaded scheduler; None before the first reload."""
        self.replicas = [Replica(self, index, scheduler | self._shared) for index in range(num_replicas)]
        """By index; a replica that has left stays until it is loaded again."""
        self.all_replicas = [*self.replicas]
        """All replicas, including those that were replaced."""
        self._may_load: dict[int, Event | None] = {}
        """Replicas that have left; the event is set when the replica may be loaded again, None: now."""
        for replica in self.replicas:
            self._start_replica(replica)
        self.operator = Operator(
            random.Random(f"operator {seed}"), self._master.control, self._master.replicas, num_replicas
        )
        self._migration_rng = random.Random(f"on the way {seed}")
        self._reloads = draw_reloads(random.Random(f"reload {seed}"))
        self._num_reloads = 0
        self._stop_round = rng.randint(0, 60) if rng.random() < 0.05 else None
        self.clients = draw_clients(rng, beams=not scheduler["static_batching"], window=scheduler["window"])
        self._arriving = deque(self.clients)
        self._leaving: list[Client] = []
        self._by_request_id: dict[str, Client] = {}

    def run(self) -> None:
        """Run the seed to its end.

        Raises:
            AssertionError: An invariant is broken.
        """
        try:
            while self._run_round():
                self._round += 1
                assert self._round < MAX_ROUNDS, f"the engine has not finished after {MAX_ROUNDS} rounds"
            self._loop.run()
            self._check_end()
            self._count()
        finally:
            for replica in self.all_replicas:
                replica.close()

    def _run_round(self) -> bool:
        if self.rng.random() < 0.7:  # otherwise clients act while a replica waits, or later
            self.let_clients_act()
        if self._round == self._stop_round:
            self._may_load.clear()
            for replica in self.replicas:
                replica.stop()
        progressed = [replica.step() for replica in self.replicas]
        may_load = [index for index, joined in self._may_load.items() if joined is None or joined.is_set()]
        progressed += map(self._load, may_load)
        if self._carrier.has_work and (self.rng.random() < 0.5 or not any(progressed)):
            self._carrier.bring()
        for counter in ("bound_violations", "audit_mismatch"):
            assert self.metrics._counts[f"llm_serving:{counter}_total"] == 0, f"{counter}_total is not 0"
        assert not any(self.metrics.num_shares_broken.values()), f"shares: {self.metrics.num_shares_broken}"
        self._check_limits_of_tenants()
        replicas = self._master.replicas
        expected = {*replicas.living()} if len(replicas) > 1 else set()
        assert replicas_in(replicas.accounting) == expected, "a replica that left still counts"
        # A client that acted during the step of one replica may have sent a request to another.
        asked = any(replica.engine.dead is None and replica.engine._inbox.messages for replica in self.replicas)
        return any(progressed) or asked or bool(self._arriving) or self._loop.has_calls or self._carrier.has_work

    # --- the clients ------------------------------------------------------------------------------------------------

    def let_clients_act(self, moment: str | None = None, engine: Engine | None = None) -> None:
        """Let due clients send or leave; `moment` is the state in which all requests of the engine are, if there is
        one.
        """
        if self.rng.random() < 0.7:
            self._loop.run()
        while self._arriving and self._arriving[0].at_round <= self._round:
            self._ask(self._arriving.popleft())
        for client in [each for each in self._leaving if self._should_leave(each, moment, engine)]:
            self._leaving.remove(client)
            self._leave(client, moment if client.engine is engine else None)
        if self.rng.random() < 0.05 and self._by_request_id:
            self._change_a_priority()
        self._change_priorities_of_migrating()
        if self._reloads and self._reloads[0][0] <= self._round:
            self._reload(self._reloads.popleft()[1])
        self.operator.act(self._round)

    def _ask(self, client: Client) -> None:
        master, limits = self._master, self._config.scheduler
        num_prompt, waiting = len(client.prompt_token_ids), master._queue.load()
        max_tokens = MAX_MODEL_LEN if limits.max_waiting_tokens is None else limits.max_waiting_tokens
        fits = client.fits and num_prompt <= max_tokens
        full = waiting.num_waiting >= limits.max_waiting_queue
        if limits.max_waiting_tokens is not None:
            full = full or waiting.num_waiting_tokens + num_prompt > max_tokens
        request_class = class_of(client.priority, self._config.request_classes)
        if request_class.max_waiting is not None:
            full = full or master._queue.class_load(request_class.name).num_waiting >= request_class.max_waiting
        deadline = None if client.patience_s is None else self.clock() + client.patience_s
        try:
            stream = master.generate(
                client.prompt_token_ids,
                client.sampling,
                Caller(priority=client.priority, tenant=client.tenant, deadline=deadline),
                request_id="simulated",
                fork_of=None if client.parent is None else client.parent.stream,
                beam_search=client.beam_search,
            )
        except ContextLengthError:
            assert not fits, "a request that fits was refused for its length"
        except CapacityError:
            assert full or deadline is not None, "a request was refused although the queue was not full"
        except UnavailableError:
            serving = [each for each in self._master.replicas.open().values() if each.executor.restart_status is None]
            assert not serving, "a live replica was ignored"
            self.totals.refusals["no live WorkAgent"] += 1
        else:
            assert fits and not full, "a request was admitted although the queue was full"
            opened = master._requests.by_id.get(stream.request_id)
            assert opened is not None
            client.stream, client.engine = stream, opened.engine
            index = master.replicas.index_of(opened.engine)
            assert index is not None and (client.parent is not None or not master.replicas.is_drained(index))
            opened.request.wants_vector = client.wants_vector
            self._by_request_id[stream.request_id] = client
            if client.leaves_in is not None:
                self._leaving.append(client)

    def _change_a_priority(self) -> None:
        client = self.rng.choice(list(self._by_request_id.values()))
        assert client.engine is not None and client.stream is not None
        if client.engine.dead is None and not client.has_ended:
            priority = self.rng.choice(PRIORITIES)
            client.engine.ask(functools.partial(client.engine.set_priority, client.stream.request_id, priority))

    def _change_priorities_of_migrating(self) -> None:
        """Change priorities of migrating requests, which no engine has, as `Control` does."""
        for opened in [each for each in self._master._requests.by_id.values() if each.is_in_transfer]:
            if self._migration_rng.random() < 0.3:
                opened.priority = self._migration_rng.choice(PRIORITIES)
                self.totals.events["priorities changed during migration"] += 1

    def _reload(self, rng: random.Random) -> None:
        """Reload rules: admission control follows at once, each engine when it reads its inbox."""
        options = draw_scheduler(rng) | {name: self._scheduler[name] for name in STAY if name in self._scheduler}
        self._config = replace(draw_config(rng, options), cluster=self._cluster)
        self._master._follow(self._config)
        self._num_reloads += 1
        self._newest_rules = options
        for replica in self.replicas:
            if replica.engine.dead is None:
                replica.engine.ask(functools.partial(replica.engine.reload, self._rules_of(replica), self._num_reloads))

    def _rules_of(self, replica: Replica) -> SchedulingRules:
        options, max_steps = self._newest_rules, replica.scheduler.limits.max_steps_in_flight
        assert options is not None
        other = create_scheduler(**options, **self._shared, max_steps_in_flight=max_steps)
        return SchedulingRules(other.limits, other.policy, other.classes, other.order, options["prefix_caching"])

    def _should_leave(self, client: Client, moment: str | None, engine: Engine | None) -> bool:
        if self._round < client.leaves_from_round:
            return False
        if client.leaves_in in (ANYWHERE, moment):
            return client.leaves_in == ANYWHERE or client.engine is engine
        return client.leaves_in == client.state()

    def _leave(self, client: Client, moment: str | None) -> None:
        assert client.stream is not None
        client.left_in = client.state()
        if moment is not None and not client.has_ended:
            client.left_in = moment
        _run(client.stream.aclose())

    def publish(self, pieces: list[RequestOutput], engine: Engine) -> None:
        """Pass on the outputs of a step; called by engines."""
        for piece in pieces:
            client = self._by_request_id[piece.request_id]
            assert not client.has_ended, f"{piece.request_id} gets output after its end"
            client.outputs.append(piece)
            client.engine = engine
        self._master.replicas._publish(pieces)

    def _depart(self, departures: list[MigratingRequest]) -> None:
        """Pass on requests that migrate to another replica; called by engines."""
        for request_id, block in [(each.request.request_id, block) for each in departures for block in each.blocks]:
            owner = self._exported_by.setdefault(block, request_id)
            assert owner == request_id, f"an epoch of block {block[0]} belongs to {owner} and to {request_id}"
        self._publish_migrating(departures)

    # --- replicas that leave and join -------------------------------------------------------------------------------

    def _start_replica(self, replica: Replica) -> None:
        """Start the loaded replica, as a thread of `Replicas` would."""
        if self._newest_rules is not None:
            replica.engine.reload(self._rules_of(replica), self._num_reloads)
        self._master.replicas._begins(replica.index, replica.engine)

    def on_replica_end(self, replica: Replica) -> None:
        """Handle the end of a replica's engine, as a thread of `Replicas` would."""
        index, replicas = replica.index, self._master.replicas
        replicas._ends(index, replica.engine)
        if not replica.stopped:
            self.totals.events["replicas that left"] += 1
            self._may_load[index] = replicas.drained.get(index)

    def _load(self, index: int) -> bool:
        """Load a replica that has joined again, possibly after several calls; return whether work is left."""
        if self.rng.random() < 0.5:
            return True
        try:
            replica = Replica(self, index, self._scheduler | self._shared)
        except WorkerDiedError:  # no machine is available
            self._may_load[index] = self._master.replicas.drained.get(index)
            return True
        del self._may_load[index]
        self.replicas[index] = replica
        self.all_replicas.append(replica)
        self._start_replica(replica)
        self.totals.events["replicas loaded again"] += 1
        return True

    # --- invariants -------------------------------------------------------------------------------------------------

    def _check_limits_of_tenants(self) -> None:
        """Check the limit over all replicas.

        All beams of a search may run, and after a reload running requests keep their slots.
        """
        limit = self._scheduler["max_running_per_tenant"]
        if limit is None or self._num_reloads:
            return
        running = (each for replica in self.replicas for each in replica.scheduler.running)
        counts = Counter(
            each.tenant for each in running if not (each.is_beam or each.root_request.beam_search is not None)
        )
        assert max(counts.values(), default=0) <= limit, f"a tenant runs more than {limit} requests"

    def _check_end(self) -> None:
        for replica in self.all_replicas:
            replica.check_end()
        master = self._master
        assert master.num_waiting == master.num_running == 0, "the master still counts requests"
        requests = master._requests
        assert not len(requests) and not requests.num_of and not requests.num_migrating_to
        assert not master.replicas.accounting.tenant_slots.migrating, "a slot of a tenant is still reserved"
        if not any(replica.stopped for replica in self.replicas):
            for index in range(len(self.replicas)):
                state = "left" if master.replicas.is_drained(index) else "serving"
                assert master.replicas.state(index) == state, f"replica {index} is {master.replicas.state(index)}"
        for client in self.clients:
            if client.stream is not None:
                self._check_client(client)

    def _check_client(self, client: Client) -> None:
        assert client.stream is not None
        name = client.stream.request_id
        all_stopped = all(replica.stopped for replica in self.replicas)
        if not client.has_ended and all_stopped and self._cluster.roles is not None:
            if client.left_in is None:
                self._check_end_of_migration(client)
            return
        assert client.has_ended, f"{name} never ended"
        client.check_answer()
        if client.left_in is None:
            read = [_run(client.stream.__anext__()) for _ in client.outputs]
            assert read == client.outputs, f"{name}: the stream differs from the engine's outputs"
        reason, error = client.outputs[-1].finish_reason, client.outputs[-1].error
        if reason is FinishReason.ABORT:
            assert client.left_in is not None, f"{name} was aborted although its client did not leave"
        if reason is FinishReason.TIMEOUT:
            assert client.patience_s is not None, f"{name} timed out without a deadline"
        poisoned = any(each.is_poisoned for each in self.clients)
        replica = next(each for each in self.all_replicas if each.engine is client.engine)
        failed = reason in (FinishReason.ERROR, FinishReason.UNAVAILABLE)
        if failed and not client.is_poisoned and error != BAD_ROW:
            waited = error is not None and "was not restarted within" in error and self._a_start_failed(replica)
            assert waited or replica.may_have_failed_requests(poisoned), (
                f"{name} ended with an error that it did not cause: {error}"
            )
        if client.is_poisoned:
            assert failed or reason in (FinishReason.ABORT, FinishReason.TIMEOUT), (
                f"{name} ended without an error in spite of its poison token"
            )

    def _check_end_of_migration(self, client: Client) -> None:
        """Check a request that found no replica after its migration: the master itself must have ended it."""
        assert client.stream is not None
        read = [_run(client.stream.__anext__()) for _ in range(len(client.outputs) + 1)]
        assert read[:-1] == client.outputs and read[-1].finish_reason is FinishReason.UNAVAILABLE
        client.outputs.append(read[-1])

    def _a_start_failed(self, replica: Replica) -> bool:
        return bool(
            replica.num_failed_starts or (self.network is not None and self.network.counts["starts that failed"])
        )

    def _count(self) -> None:
        totals, counts = self.totals, self.metrics._counts
        admitted = [each for each in self.clients if each.stream is not None]
        moves = sum((agent.block_moves for replica in self.all_replicas for agent in replica.agents), Counter())
        totals.events.update(
            {
                "seeds": 1,
                "rounds": self._round,
                "steps": counts["llm_serving:steps_total"],
                "requests": len(self.clients),
                "tokens": counts["vllm:generation_tokens_total"],
                "forks": sum(each.parent is not None and each.parent.stream is not None for each in admitted),
                "beam searches": sum(each.beam_search is not None for each in admitted),
                "poisoned requests": sum(each.is_poisoned for each in admitted),
                "preemptions": counts["vllm:num_preemptions_total"],
                "blocks swapped out": moves[BlockMoveKind.SWAP_OUT],
                "blocks swapped in": moves[BlockMoveKind.SWAP_IN],
                "blocks copied": moves[BlockMoveKind.COPY],
                "blocks exported": moves[BlockMoveKind.EXPORT],
                "blocks imported": moves[BlockMoveKind.IMPORT],
                "tokens found in the prefix cache": counts["vllm:prefix_cache_hits_total"],
                "audits": counts["llm_serving:audits_total"],
                "draft tokens": sum(self.metrics.draft_tokens["vllm:spec_decode_num_draft_tokens_total"].values()),
                "accepted draft tokens": sum(
                    self.metrics.draft_tokens["vllm:spec_decode_num_accepted_tokens_total"].values()
                ),
                "restarts": counts["llm_serving:worker_restarts_total"],
                "replicas": len(self.replicas),
                "restarts that failed": sum(each.num_failed_starts for each in self.all_replicas),
                "reloads": self._num_reloads,
                "masters stopped": int(self._stop_round is not None and self._stop_round <= self._round),
            }
        )
        totals.events.update(self.operator.counts)
        if self.network is not None:
            totals.network.update({"clusters": 1, "machines": self.network.num_machines, **self.network.counts})
        for replica in self.all_replicas:
            totals.faults.update(replica.faults.counts)
        for (_, reason), count in self.metrics.classes._refusals.items():
            totals.refusals[reason] += count
        totals.aborts.update(each.left_in for each in admitted if each.left_in is not None)
        totals.ends.update(str(each.outputs[-1].finish_reason) for each in admitted)


def replicas_in(part: object) -> set[int]:
    """Return the replicas of which an object of the fleet accounting has data: the integer keys of its mappings."""
    found, parts = set[int](), [part]
    while parts:
        each = parts.pop()
        if isinstance(each, dict):
            found.update(key for key in each if isinstance(key, int))
        parts += each.values() if isinstance(each, dict) else getattr(each, "__dict__", {}).values()
    return found


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits for an external event; it may yield to the event loop."""
    try:
        while coroutine.send(None) is None:
            pass
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits for an external event")


@dataclass
class Totals:
    """Counts of events by name."""

    events: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    network: Counter[str] = field(default_factory=Counter)
    """Events of clusters with WorkAgents on other machines."""
    aborts: Counter[str] = field(default_factory=Counter)
    """Aborts by the state of the request when its client left."""
    refusals: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, other: Totals) -> None:
        for each in fields(self):
            getattr(self, each.name).update(getattr(other, each.name))

    def __str__(self) -> str:
        return "\n".join(
            f"{each.name}: {', '.join(f'{name} {count:,}' for name, count in getattr(self, each.name).items())}"
            for each in fields(self)
        )


def run_seeds(first: int, count: int, num_machines: int | None = None) -> Totals:
    """Run the seeds `first` .. `first + count - 1`.

    Raises:
        AssertionError: A seed breaks an invariant; the text has the command that repeats it.
    """
    totals = Totals()
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(first, first + count):
            try:
                simulation = Simulation(seed, num_machines)
                simulation.run()
            except Exception as error:
                command = f"python tests/tools/simulation.py --first {seed} --seeds 1"
                command += "" if num_machines is None else f" --machines {num_machines}"
                raise AssertionError(f"seed {seed}: {error}\nrepeat it with: {command}") from error
            totals.add(simulation.totals)
    finally:
        logging.disable(logging.NOTSET)
    return totals


def run_in_processes(first: int, count: int, num_processes: int, num_machines: int | None = None) -> Totals:
    """Run the seeds as `run_seeds` does, distributed over processes."""
    end = first + count
    shares = [(start, min(SEEDS_PER_SHARE, end - start), num_machines) for start in range(first, end, SEEDS_PER_SHARE)]
    totals = Totals()
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for share in pool.starmap(run_seeds, shares, chunksize=1):
            totals.add(share)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds (default: 1000)")
    parser.add_argument("--processes", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--machines", type=int, help="machines beside the master's (default: drawn, often none)")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.processes == 1:
        totals = run_seeds(args.first, args.seeds, args.machines)
    else:
        totals = run_in_processes(args.first, args.seeds, args.processes, args.machines)
    seconds = time.perf_counter() - began
    sys.stdout.write(f"{totals}\n{args.seeds:,} seeds in {seconds:.1f} s, {args.seeds / seconds:.0f} a second; ")
    sys.stdout.write("no invariant is broken\n")


if __name__ == "__main__":
    main()
