"""Worker statuses for the router's tests: sensible unless told otherwise."""

from proto.worker_pb2 import (
    ROLE_DECODE,
    ROLE_PREFILL,
    ExpertGroup,
    ProcessIdentity,
    RankStatus,
    Role,
    WorkerStatus,
)

ROLES: dict[str, Role.ValueType] = {"prefill": ROLE_PREFILL, "decode": ROLE_DECODE}


def make_status(
    role: str,
    epoch: str,
    *,
    name: str = "",
    model: str = "demo",
    fingerprint: str = "f1",
    page_tokens: int = 64,
    pairing_version: str = "1",
    max_model_len: int = 4096,
    ready: bool = True,
    draining: bool = False,
    num_ranks: int = 1,
    num_running: int = 0,
    num_waiting: int = 0,
    max_running: int = 4,
    pages_free: int = 100,
    pages_total: int = 100,
    waiting_tokens: int = 0,
    stalled: bool = False,
    slow: bool = False,
    accepted: int = 0,
    expert_group: ExpertGroup | None = None,
) -> WorkerStatus:
    """Figures of a rank are the same for each of `num_ranks`."""
    return WorkerStatus(
        identity=ProcessIdentity(
            role=ROLES[role], name=name or f"{role}-{epoch}", address="0.0.0.0:1", epoch=epoch
        ),
        model=model,
        kv_fingerprint=fingerprint,
        page_tokens=page_tokens,
        pairing_version=pairing_version,
        max_model_len=max_model_len,
        ready=ready,
        draining=draining,
        num_accepted_total=accepted,
        expert_group=expert_group,
        ranks=[
            RankStatus(
                rank=rank,
                num_running=num_running,
                num_waiting=num_waiting,
                max_running=max_running,
                pages_free=pages_free,
                pages_total=pages_total,
                num_waiting_tokens=waiting_tokens,
                stalled=stalled,
                slow=slow,
            )
            for rank in range(num_ranks)
        ],
    )
