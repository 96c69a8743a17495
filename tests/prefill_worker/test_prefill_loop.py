"""A prefill rank end to end: what arrives in the target equals one forward pass of the prompt."""

import msgspec
import pytest
import torch

from core.token_ids import pack_ids
from engine.link.messages import (
    Abort,
    Failed,
    PageRun,
    Prefilled,
    RankMessage,
    Stopped,
    SubmitPrefill,
)
from engine.sampling.sampler import SampleRow, sample
from engine.sampling.sampling_params import Sampling
from prefill_worker.loop import PLAN_WINDOW
from tests.prefill_worker.one_rank import (
    PAGE,
    Model,
    OneRank,
    TargetRank,
    check_arrived,
    prefilled,
    submit_to,
    tokens,
)
from tests.transfer.memory import MemoryTransfer


@pytest.mark.parametrize("num_tokens", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 97])
@pytest.mark.parametrize("chunk_tokens", [PAGE, 4 * PAGE, 1024])
def test_kv_and_first_token_are_those_of_one_forward_pass(
    model: Model, num_tokens: int, chunk_tokens: int
) -> None:
    rank, target = OneRank(model, chunk_tokens=chunk_tokens), TargetRank(model)
    submit = submit_to(target, "a", tokens(num_tokens), Sampling(logprobs=True, top_logprobs=2))
    result = prefilled(rank.run(submit), "a")
    check_arrived(model, target, submit)
    kv, logits = model.reference(submit.token_ids)
    torch.testing.assert_close(target.kv(submit), kv, rtol=1e-4, atol=1e-5)
    assert result.token.token_id == int(logits.argmax())
    assert result.token.logprob == pytest.approx(float(logits.log_softmax(0).max()), abs=1e-4)
    assert [token for token, _ in result.token.top] == logits.topk(2).indices.tolist()
    assert (result.num_cached_tokens, result.num_computed_tokens) == (0, num_tokens)
    page_bytes = PAGE * model.config.kv_dim * 4
    assert result.kv_bytes == model.config.num_kv_layers * -(-num_tokens // PAGE) * page_bytes
    assert rank.link.stats.kv_bytes_total == result.kv_bytes
    rank.check_nothing_held()


def test_a_known_prefix_is_sent_without_computing_it(model: Model) -> None:
    rank, target = OneRank(model), TargetRank(model)
    prompt = tokens(70)
    first = submit_to(target, "a", prompt)
    again = submit_to(target, "b", prompt)
    longer = submit_to(target, "c", prompt[: 5 * PAGE] + tokens(30, seed=1))
    exact = submit_to(target, "d", prompt[: 4 * PAGE])
    messages = rank.run(first, again, longer, exact)
    for submit, num_cached in ((first, 0), (again, 64), (longer, 40), (exact, 24)):
        assert prefilled(messages, submit.attempt_id).num_cached_tokens == num_cached
        check_arrived(model, target, submit)
        _, logits = model.reference(submit.token_ids)
        assert prefilled(messages, submit.attempt_id).token.token_id == int(logits.argmax())
    stats = rank.link.stats
    assert stats.tokens_cached_total == 64 + 40 + 24
    assert stats.tokens_computed_total == 70 + 6 + 30 + 8
    rank.check_nothing_held()


def test_requests_of_one_moment_share_steps_and_prefixes(model: Model) -> None:
    """Same prompt three times at once, others between, two targets: all right, some shared."""
    rank, here, there = OneRank(model, chunk_tokens=2 * PAGE), TargetRank(model), TargetRank(model)
    prompt = tokens(6 * PAGE + 3)
    submits = [
        (here, submit_to(here, "a", prompt)),
        (there, submit_to(there, "b", tokens(5, seed=1))),
        (there, submit_to(there, "c", prompt)),
        (here, submit_to(here, "d", tokens(40, seed=2))),
        (here, submit_to(here, "e", prompt)),
    ]
    messages = rank.run(rank.tell(*(submit for _, submit in submits)))
    for target, submit in submits:
        check_arrived(model, target, submit)
        prefilled(messages, submit.attempt_id)
    order = [m.attempt_id for m in messages if isinstance(m, Prefilled)]
    assert order.index("b") == 0  # short ones do not wait for long ones
    assert rank.link.stats.tokens_cached_total > 0
    rank.check_nothing_held()


def test_a_pool_that_is_short_makes_requests_wait_and_forgets_old_prefixes(model: Model) -> None:
    rank, target = OneRank(model, num_pages=7), TargetRank(model, num_pages=256)
    submits = [submit_to(target, f"a{i}", tokens(3 * PAGE + i, seed=i)) for i in range(9)]
    messages = rank.run(rank.tell(*submits))
    assert [m.attempt_id for m in messages if isinstance(m, Prefilled)] == [
        f"a{i}" for i in range(9)
    ]
    for submit in submits:
        check_arrived(model, target, submit)
    rank.check_nothing_held()


def test_a_crowd_of_higher_priority_waits_for_the_pages_of_one_that_runs(model: Model) -> None:
    rank = OneRank(model, num_pages=8, chunk_tokens=PAGE, max_waiting=99)
    target = TargetRank(model, num_pages=512)
    submit = submit_to(target, "low", tokens(6 * PAGE))
    crowd = [
        msgspec.structs.replace(
            submit_to(target, f"high-{number}", tokens(3 * PAGE, seed=number)), priority=1
        )
        for number in range(PLAN_WINDOW + 1)
    ]

    def come() -> None:
        if rank.loop._num_steps:
            rank.link.inbox.extend(crowd)
            rank.link.on_drain = lambda: None

    rank.link.on_drain = come
    messages = rank.run(submit)
    done = {message.attempt_id for message in messages if isinstance(message, Prefilled)}
    assert done == {"low", *(each.attempt_id for each in crowd)}
    rank.check_nothing_held()


def test_sampling_depends_on_seed_and_position_only(model: Model) -> None:
    sampling = Sampling(temperature=1.5, top_p=0.9, seed=11)
    prompt = tokens(50)
    _, logits = model.reference(prompt)
    row = SampleRow(sampling=sampling, position=len(prompt))
    expected = sample(logits.unsqueeze(0), [row])[0].token_id
    for chunk_tokens in (PAGE, 64):
        rank, target = OneRank(model, chunk_tokens=chunk_tokens), TargetRank(model)
        submit = submit_to(target, "a", prompt, sampling)
        assert prefilled(rank.run(submit), "a").token.token_id == expected


def test_end_tokens_are_not_sampled_before_min_tokens(model: Model) -> None:
    prompt = tokens(20)
    _, logits = model.reference(prompt)
    best, second = logits.topk(2).indices.tolist()
    rank, target = OneRank(model), TargetRank(model)
    sampling = Sampling(stop_token_ids=(best, 999_999), min_tokens=2)
    messages = rank.run(submit_to(target, "a", prompt, sampling))
    assert prefilled(messages, "a").token.token_id == second


# ---- aborts


def abort_scenario(
    model: Model, abort_at: int
) -> tuple[OneRank, TargetRank, list[SubmitPrefill], list[RankMessage], bool]:
    """Two requests in chunks, transfers landing one by one. Attempt "a" is aborted when the rank
    listens for the `abort_at`th time; False when it never listened so often."""
    rank, target = OneRank(model, chunk_tokens=2 * PAGE), TargetRank(model)
    rank.transfer.held = True
    prompt = tokens(5 * PAGE + 2)
    warm = submit_to(target, "warm", prompt[: 2 * PAGE + 1])
    submits = [submit_to(target, "a", prompt), submit_to(target, "b", tokens(30, seed=3))]
    rank.run(warm, *[lambda: rank.transfer.deliver()] * 3)
    listened = 0
    aborted = False

    def on_drain() -> None:
        nonlocal listened, aborted
        if listened == abort_at:
            rank.link.inbox.append(Abort(attempt_id="a"))
            aborted = True
        listened += 1

    deliveries = [lambda: (rank.transfer.deliver(1), None)[1]] * 40
    script = [rank._line(line) for line in (rank.tell(*submits), *deliveries)]
    rank.link.on_drain = on_drain
    messages = rank.run(*script)
    return rank, target, submits, messages, aborted


def test_an_abort_at_any_point_gives_back_every_page(model: Model) -> None:
    answered_before, stopped_early = 0, 0
    for abort_at in range(200):
        rank, target, submits, messages, aborted = abort_scenario(model, abort_at)
        if not aborted:
            break
        stops = [m for m in messages if isinstance(m, Stopped)]
        assert [stop.attempt_id for stop in stops] == ["a"]
        assert not [m for m in messages if isinstance(m, Failed)]
        check_arrived(model, target, submits[1])  # the other one is untouched
        prefilled(messages, "b")
        answered = any(isinstance(m, Prefilled) and m.attempt_id == "a" for m in messages)
        answered_before += answered
        stopped_early += stops[0].was_known and not answered
        rank.check_nothing_held()
        MemoryTransfer._alive.clear()
    else:
        pytest.fail("the scenario does not end")
    assert answered_before > 2
    assert stopped_early > 2


def test_nothing_lands_after_stopped(model: Model) -> None:
    rank, target = OneRank(model, chunk_tokens=PAGE), TargetRank(model)
    rank.transfer.held = True
    submit = submit_to(target, "a", tokens(10 * PAGE))
    seen: list[int] = []

    def abort_between_chunks() -> None:
        if rank.loop._num_steps == 3 and not seen:
            rank.link.inbox.append(Abort(attempt_id="a"))
            seen.append(rank.transfer.num_in_flight)

    rank.link.on_drain = abort_between_chunks
    messages = rank.run(submit, lambda: None)
    assert messages == []  # three chunks are in flight, and nothing was said
    assert seen[0] > 0
    assert rank.transfer.num_in_flight == seen[0]
    messages = rank.run(lambda: (rank.transfer.deliver(), None)[1])
    assert messages == [Stopped(attempt_id="a", was_known=True)]
    assert rank.transfer.num_in_flight == 0
    rank.check_nothing_held()


def test_an_unknown_attempt_is_confirmed(model: Model) -> None:
    messages = OneRank(model).run(Abort(attempt_id="never seen"))
    assert messages == [Stopped(attempt_id="never seen", was_known=False)]


# ---- bad requests


def broken_targets(submit: SubmitPrefill) -> dict[str, SubmitPrefill]:
    runs, replace = submit.target.runs, msgspec.structs.replace

    def with_target(**changes: object) -> SubmitPrefill:
        return replace(submit, target=replace(submit.target, **changes))

    agent = msgspec.msgpack.decode(submit.target.agent)
    return {
        "FAILED_PRECONDITION other model": with_target(kv_fingerprint="another"),
        "INVALID_ARGUMENT malformed": with_target(agent=b"\xc1garbage"),
        "INVALID_ARGUMENT layers": with_target(
            agent=msgspec.msgpack.encode(agent | {"num_bytes": agent["num_bytes"] + 4})
        ),
        "INVALID_ARGUMENT has 2 pages": with_target(runs=runs[:-1]),
        "INVALID_ARGUMENT has 4 pages": with_target(runs=(*runs, PageRun(first=60, count=1))),
        "INVALID_ARGUMENT not within": with_target(runs=(*runs[:-1], PageRun(first=64, count=1))),
        "INVALID_ARGUMENT is not within": with_target(
            runs=(*runs[:-2], PageRun(first=63, count=2))
        ),
        "INVALID_ARGUMENT twice": with_target(runs=(*runs[:-1], runs[0])),
        "INVALID_ARGUMENT do not fit": replace(submit, token_ids=pack_ids(tokens(65 * PAGE))),
        "INVALID_ARGUMENT 0 tokens": replace(submit, token_ids=b""),
    }


def test_targets_that_cannot_be_right_are_refused(model: Model) -> None:
    rank, target = OneRank(model), TargetRank(model)
    good = submit_to(target, "a", tokens(20))
    for expected, bad in broken_targets(good).items():
        (failure,) = rank.run(bad)
        assert isinstance(failure, Failed)
        code, _, words = expected.partition(" ")
        assert failure.code == code, expected
        assert words in failure.message or code == "FAILED_PRECONDITION", failure.message
        rank.check_nothing_held()
    prefilled(rank.run(good), "a")
    check_arrived(model, target, good)


def test_a_full_queue_refuses(model: Model) -> None:
    rank, target = OneRank(model, max_waiting=2), TargetRank(model)
    submits = [submit_to(target, name, tokens(5, seed=i)) for i, name in enumerate("abc")]
    messages = rank.run(rank.tell(*submits))
    assert {m.attempt_id: type(m) for m in messages} == {  # type: ignore[union-attr]
        "a": Prefilled,
        "b": Prefilled,
        "c": Failed,
    }
    rank.check_nothing_held()


def test_a_rank_leaves_with_the_last_one_of_its_group(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of other nodes that still have requests need its experts. It tells them once."""
    rank, others = OneRank(model, chunk_tokens=PAGE), [0, 0, 0, 1]
    told: list[int] = []
    wakes: list[None] = []

    def exchange(facts: tuple[int, ...]) -> list[tuple[int, ...]]:
        told.append(facts[2])
        return [facts, (0, 0, others[len(told) - 1], *facts[3:])]

    monkeypatch.setattr(rank.group, "exchange", exchange)
    monkeypatch.setattr(rank.group, "wake", lambda: wakes.append(None))
    # The other rank steps again and again, whatever this one does.
    monkeypatch.setattr(rank.group, "peer_woke", lambda: len(told) >= 2)
    rank.run()
    assert told == [0, 1, 1, 1]
    assert len(wakes) == 1
