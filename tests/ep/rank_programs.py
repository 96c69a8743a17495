"""What the ranks of `RankPool` run."""

import os
import random
import signal
import threading
import time

import torch
import zmq

from core.errors import Unavailable
from ep.dispatch.collective import CollectiveDispatcher
from ep.dispatch.expert_shard import ExpertShard
from ep.group.group import EpGroup
from ep.placement.placement import Placement
from tests.ep.routing import Routing, dense_sum, expert, route


def through(
    routing: Routing,
    shard: ExpertShard,
    tokens_per_rank: tuple[int, ...],
) -> torch.Tensor:
    """[T, H]: the tokens through their experts, of which this rank holds some."""
    experts, beside = shard.local_experts(0), list[str]()
    physical = shard.maps.layer(0).choose(routing.topk_idx, shard.rank)
    dispatched = shard.dispatcher.dispatch(
        routing.hidden,
        physical,
        routing.topk_weights,
        tokens_per_rank,
        meanwhile=lambda: beside.append("computed"),
    )
    assert beside == ["computed"]
    rows = dispatched.hidden.split(dispatched.expert_counts.tolist())
    assert len(rows) == len(experts)
    outputs = [expert(logical, x) for logical, x in zip(experts, rows, strict=True)]
    out = torch.cat(outputs) if outputs else dispatched.hidden
    return shard.dispatcher.combine(out, dispatched.handle)


def some_placement(rng: random.Random, num_experts: int, num_ranks: int) -> Placement:
    """In turn, or shuffled with replicas and empty slots anywhere."""
    num_redundant = rng.choice([0, 0, 1, 5])
    trivial = Placement.trivial(1, num_experts, num_ranks, num_redundant)
    if rng.random() < 0.5:
        return trivial
    experts = list(trivial.physical_to_logical[0])
    rng.shuffle(experts)
    return trivial.with_layers({0: tuple(experts)})


def compare_dispatchers(group: EpGroup, seed: int, rounds: int) -> int:
    """Collective against local (equal bits) and a dense loop; returns tokens compared."""
    group.begin_steps()
    common = random.Random(seed)  # in step on all ranks
    num_tokens = 0
    for round_ in range(rounds):
        num_experts = common.choice([1, 3, 10, 16])
        num_choices = common.randint(1, min(8, num_experts))
        width = common.choice([1, 7, 64, 256])
        dtype = common.choice([torch.float32, torch.bfloat16])
        how = common.choice(["random", "random", "one expert", "one rank"])
        tokens = tuple(common.choice([0, 0, 1, 5, 40]) for _ in range(group.size))
        placement = some_placement(common, num_experts, group.size)
        routing = route(
            seed * 1000 + round_ * 10 + group.rank,
            how,
            tokens[group.rank],
            num_experts,
            num_choices,
            width,
            dtype,
        )
        dispatcher = CollectiveDispatcher(group, placement.slots_per_rank)
        combined = through(
            routing, ExpertShard.build(placement, group.rank, dispatcher, "cpu"), tokens
        )
        alone = through(routing, ExpertShard.alone(1, num_experts), (tokens[group.rank],))
        assert combined.dtype == dtype
        assert torch.equal(combined, alone), (round_, how, tokens)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            combined.float(), dense_sum(routing), rtol=tolerance, atol=tolerance
        )
        num_tokens += tokens[group.rank]
    return num_tokens


def large_tensors(group: EpGroup, num_rows: int) -> bool:
    """Far more bytes than the kernel buffers, and very uneven."""
    own = torch.full((num_rows, 300), group.rank, dtype=torch.int32)
    everything = torch.empty((num_rows * group.size, 300), dtype=torch.int32)
    group.collectives.all_gather(everything, own)
    expected = torch.arange(group.size, dtype=torch.int32).repeat_interleave(num_rows)
    assert torch.equal(everything, expected[:, None].expand(-1, 300))
    # Everything goes to the last rank.
    is_last = group.rank == group.size - 1
    received = torch.empty((num_rows * group.size if is_last else 0, 300), dtype=torch.int32)
    group.collectives.all_to_all(
        received,
        [num_rows if is_last else 0] * group.size,
        own,
        [0] * (group.size - 1) + [num_rows],
    )
    return not is_last or torch.equal(received, everything)


def idle_and_wake(group: EpGroup, seed: int, num_items: int) -> tuple[int, int]:
    """Work arrives at random on every rank; returns (items done here, exchanges).

    Ends when all ranks together have done `num_items` each. An item lost to a missed wake-up
    shows as a hang.
    """
    context = zmq.Context.instance()
    inbox = context.socket(zmq.PAIR)
    address = f"inproc://work-{seed}-{group.rank}"
    inbox.bind(address)
    rng = random.Random(seed * 100 + group.rank)
    pauses = [rng.choice([0, 0, 0.0001, 0.001, 0.004]) for _ in range(num_items)]

    def feed() -> None:
        outbox = context.socket(zmq.PAIR)
        outbox.connect(address)
        for pause in pauses:
            time.sleep(pause)
            outbox.send(b"item")
        outbox.close()

    feeder = threading.Thread(target=feed)
    feeder.start()
    queued = done = exchanges = 0
    deadline = time.monotonic() + 50
    while True:
        assert time.monotonic() < deadline, f"stuck: {queued} queued, {done} done"
        while inbox.poll(0):
            inbox.recv()
            queued += 1
        facts = group.exchange([queued, done])
        exchanges += 1
        if all(total == num_items for _, total in facts):
            break
        if any(waiting for waiting, _ in facts):
            taken = min(queued, 3)
            queued, done = queued - taken, done + taken
            continue
        while not inbox.poll(0) and not group.peer_woke():
            assert time.monotonic() < deadline, f"overslept: {queued} queued, {done} done"
            group.idle_wait(inbox, 20.0)
        if rng.random() < 0.5:
            group.wake()  # an exchange wakes the others as well
    feeder.join()
    inbox.close()
    return done, exchanges


def lose_a_peer(group: EpGroup, how: str) -> tuple[str, float]:
    """The last rank kills itself; the others are in `exchange`, in a collective, or idle."""
    group.exchange([1])
    if group.rank == group.size - 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    idle = zmq.Context.instance().socket(zmq.PAIR)
    idle.bind("inproc://idle")
    try:
        if how == "exchange":
            group.exchange([1])
        elif how == "collective":
            out = torch.empty(group.size, 1)
            group.collectives.all_gather(out, torch.zeros(1, 1))
            group.collectives.all_gather(out, torch.zeros(1, 1))
        else:
            while time.monotonic() - started < 20:
                group.idle_wait(idle, 20.0)
    except Unavailable as error:
        return str(error), time.monotonic() - started
    finally:
        idle.close()
    raise AssertionError("the loss went unnoticed")
