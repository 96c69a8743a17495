"""Events and a state for tests of a decode rank's books."""

from dataclasses import replace

from decode_worker.events import Event, Landed, Launched, Outcome, RankFacts
from decode_worker.state import RankState
from engine.kv.pages import PagePool
from engine.link.kv_notice import KvNotice
from engine.link.messages import (
    Prefilled,
    Submit,
    TokenOut,
)
from engine.sampling.sampling_params import Sampling
from tests.packed_sampling import packed

FACTS = RankFacts(
    num_layers=2,
    page_tokens=4,
    max_model_len=64,
    max_running=8,
    eos_token_ids=(2,),
    kv_arrival_seconds=5.0,
    agent=b"agent",
    kv_fingerprint="f",
    attempt_prefix="e-0",
)
EOS, OTHER = 2, 7


def make_state(num_pages: int = 20, num_drafts: int = 0) -> RankState:
    return RankState(replace(FACTS, speculative_tokens=num_drafts), PagePool(num_pages))


def submit(request_id: str, num_tokens: int = 6, max_tokens: int = 10) -> Submit:
    return Submit(
        request_id=request_id,
        num_prompt_tokens=num_tokens,
        last_token_id=OTHER,
        sampling=packed(Sampling(max_tokens=max_tokens)),
    )


def prefilled(attempt_id: str, token_id: int = OTHER, request_id: str = "a") -> Prefilled:
    return Prefilled(
        request_id=request_id,
        attempt_id=attempt_id,
        token=TokenOut(token_id=token_id),
        num_cached_tokens=0,
        num_computed_tokens=6,
        kv_bytes=1000,
        queue_seconds=0.0,
        compute_seconds=0.0,
        transfer_seconds=0.5,
    )


def all_kv(attempt_id: str, num_pages: int = 2) -> KvNotice:
    return KvNotice(attempt_id, 0, FACTS.num_layers, 0, num_pages)


def stepped(*request_ids: str, token_id: int = OTHER) -> tuple[Event, Event]:
    """A whole step of these requests, which gives each the same token."""
    outcome = Outcome((TokenOut(token_id=token_id),))
    return Launched(request_ids), Landed((outcome,) * len(request_ids))
