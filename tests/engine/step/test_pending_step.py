"""Steps that are begun before the tokens of the one in front of them are known."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine.link.messages import (
    TokenOut,
)
from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.step.decode_graphs import DecodeGraphs
from engine.step.graph_capture import CudaCapture, RepeatedCall
from engine.step.pending_step import PendingStep, PendingToken
from engine.step.runner import Runner
from engine.step.sequence_chunk import UNKNOWN, SequenceChunk
from model.batch import AttentionForm, ForwardBatch
from model.deepseek import DeepseekV3
from tests.model.driver import load_all
from tests.model.random_folder import make_random_folder

PAGE_TOKENS, NUM_PAGES, PAGES_EACH = 8, 64, 4
NUM_STEPS = 6
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=4),
    Sampling(temperature=0.8, seed=5, top_k=20, logprobs=True, top_logprobs=2),
    Sampling(temperature=1.2, seed=6, logit_bias=((7, 2.0),)),
]
KINDS = [
    "cpu",
    "in background",
    "recorded",
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cuda, recorded", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_folder(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.fixture(params=KINDS)
def make_runner(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], Runner]]:
    device = torch.device("cuda" if "cuda" in request.param else "cpu")
    model = load_all(folder, device=device)
    runners: list[Runner] = []

    def make() -> Runner:
        config = model.config
        shape = (config.num_layers, NUM_PAGES, PAGE_TOKENS, config.kv_dim)
        cache, graphs = torch.zeros(shape, device=device), None
        if "recorded" in request.param:
            graphs = DecodeGraphs(
                model.decode,
                cache,
                sizes=(1, 2, 6),
                max_pages=PAGES_EACH,
                vocab_size=config.vocab_size,
                capture=CudaCapture(device) if device.type == "cuda" else RepeatedCall(),
            )
            graphs.capture_all()
        in_background = request.param == "in background"
        form = AttentionForm.ABSORBED
        runners.append(Runner(model, cache, form, graphs=graphs, in_background=in_background))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def chunk(row: int, position: int, token_id: int | PendingToken) -> SequenceChunk:
    """The token at `position` of request `row`."""
    return SequenceChunk(
        token_ids=UNKNOWN if isinstance(token_id, PendingToken) else [token_id],
        start=position,
        pages=range(row * PAGES_EACH, (row + 1) * PAGES_EACH),
        sample=SampleRow(sampling=SAMPLINGS[row], position=position + 1),
        follows=token_id if isinstance(token_id, PendingToken) else None,
    )


def begin(runner: Runner, chunks: Sequence[SequenceChunk]) -> PendingStep:
    return runner.begin(chunks, (len(chunks),))


def known(tokens: Sequence[TokenOut | None]) -> list[TokenOut]:
    assert all(tokens)
    return [token for token in tokens if token is not None]


def one_by_one(runner: Runner) -> list[list[TokenOut]]:
    tokens, out = [11 + row for row in range(len(SAMPLINGS))], []
    for position in range(NUM_STEPS):
        chunks = [chunk(row, position, token_id) for row, token_id in enumerate(tokens)]
        out.append(known(runner.step(chunks, (len(chunks),))))
        tokens = [token.token_id for token in out[-1]]
    return out


def assert_same(got: list[list[TokenOut]], want: list[list[TokenOut]]) -> None:
    assert [[one.token_id for one in step] for step in got] == [
        [one.token_id for one in step] for step in want
    ]
    for one, other in zip(sum(got, []), sum(want, []), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_tokens_that_never_pass_through_the_host(make_runner: Callable[[], Runner]) -> None:
    want = one_by_one(make_runner())
    runner = make_runner()
    steps = [begin(runner, [chunk(row, 0, 11 + row) for row in range(len(SAMPLINGS))])]
    for position in range(1, NUM_STEPS):
        before = steps[-1]
        steps.append(
            begin(
                runner,
                [chunk(row, position, PendingToken(before, row)) for row in range(len(SAMPLINGS))],
            )
        )
    assert_same([known(step.result()) for step in steps], want)


def test_some_tokens_are_known_and_rows_change_places(make_runner: Callable[[], Runner]) -> None:
    want = one_by_one(make_runner())
    runner = make_runner()
    order = list(range(len(SAMPLINGS)))
    before = begin(runner, [chunk(row, 0, 11 + row) for row in order])
    got: list[dict[int, TokenOut]] = []
    for position in range(1, NUM_STEPS):
        previous, order = order, order[1:] + order[:1]
        half = len(order) // 2
        # Half of them are in flight, the others were heard of by now.
        here = dict(zip(previous, known(before.result()), strict=True))
        got.append(here)
        step = begin(
            runner,
            [
                chunk(row, position, PendingToken(before, previous.index(row)))
                if place < half
                else chunk(row, position, here[row].token_id)
                for place, row in enumerate(order)
            ],
        )
        before = step
    got.append(dict(zip(order, known(before.result()), strict=True)))
    assert_same([[step[row] for row in range(len(SAMPLINGS))] for step in got], want)


def test_page_lists_may_change_once_a_step_has_begun(folder: Path) -> None:
    model = load_all(folder)
    gate, seen = threading.Event(), []
    forward = model.forward

    class Slow(DeepseekV3):
        """Waits for the gate in front of each pass."""

        def forward(self, batch: ForwardBatch, *_: object) -> torch.Tensor:
            assert gate.wait(60)
            seen.append(batch.block_table.tolist())
            return forward(batch, cache)

    cache = torch.zeros(model.config.num_layers, NUM_PAGES, PAGE_TOKENS, model.config.kv_dim)
    slow = Slow(**{name: getattr(model, name) for name in model.__dataclass_fields__})
    runner = Runner(slow, cache, AttentionForm.ABSORBED, in_background=True)
    pages = [3]
    one = SequenceChunk(
        token_ids=[5], start=0, pages=pages, sample=SampleRow(sampling=Sampling(), position=1)
    )
    step = begin(runner, [one])
    pages[0] = 9
    gate.set()
    step.wait()
    assert seen == [[[3]]]
    runner.close()


def test_who_waits_gets_the_error(folder: Path) -> None:
    model = load_all(folder)
    cache = torch.zeros(model.config.num_layers, 1, PAGE_TOKENS, model.config.kv_dim)
    runner = Runner(model, cache, AttentionForm.ABSORBED, in_background=True)
    beyond = begin(runner, [chunk(3, 0, 10**6)])  # there is no such token
    with pytest.raises((IndexError, RuntimeError)):
        beyond.wait()
    with pytest.raises((IndexError, RuntimeError)):
        beyond.result()
    follower = begin(runner, [chunk(0, 1, PendingToken(beyond, 0))])
    with pytest.raises(AssertionError, match="overtakes"):
        follower.result()
    assert runner.runs_ahead
    runner.close()


def test_a_rank_without_requests_takes_part(make_runner: Callable[[], Runner]) -> None:
    assert begin(make_runner(), []).result() == []


@pytest.mark.gpu
def test_recorded_steps_begin_without_a_look_at_the_gpu(folder: Path) -> None:
    model = load_all(folder, device="cuda")
    config, device = model.config, torch.device("cuda")
    shape = (config.num_layers, NUM_PAGES, PAGE_TOKENS, config.kv_dim)
    cache = torch.zeros(shape, device=device)
    graphs = DecodeGraphs(
        model.decode,
        cache,
        sizes=(6,),
        max_pages=PAGES_EACH,
        vocab_size=config.vocab_size,
        capture=CudaCapture(device),
    )
    graphs.capture_all()
    runner = Runner(model, cache, AttentionForm.ABSORBED, graphs=graphs)
    want = one_by_one(runner)  # compiles what samples, too
    rows = range(len(SAMPLINGS))
    steps = [begin(runner, [chunk(row, 0, 11 + row) for row in rows])]
    steps[0].wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for position in range(1, NUM_STEPS):
            chunks = [chunk(row, position, PendingToken(steps[-1], row)) for row in rows]
            steps.append(begin(runner, chunks))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same([known(step.result()) for step in steps], want)
    assert steps[2].seconds_behind(steps[1]) < 1
