"""Settings of the router process."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from core.settings import HostPorts, PeerSettings
from core.token_file import TokenFile


def _check_url(text: str) -> str:
    if text and not text.startswith(("http://", "https://")):
        raise ValueError("no http:// or https:// URL")
    return text


class RouterSettings(PeerSettings):
    """Assigns requests to pairs of a prefill and a decode worker."""

    model_config = SettingsConfigDict(cli_prog_name="router")

    # ---- where workers are
    discovery: Literal["static", "dns", "kubernetes"] = Field(
        "static",
        description="How workers are found: static takes --prefill and --decode, dns looks names "
        "up, kubernetes watches pods",
    )
    prefill: HostPorts = Field((), description="Prefill workers: host:port,host:port,...")
    decode: HostPorts = Field((), description="Decode workers: host:port,host:port,...")
    prefill_dns: HostPorts = Field(
        (), description="Names whose addresses are prefill workers: name:port,name:port,..."
    )
    decode_dns: HostPorts = Field(
        (), description="Names whose addresses are decode workers: name:port,name:port,..."
    )
    dns_interval_seconds: float = Field(
        5.0, ge=0.1, le=3600, description="Time between two look-ups of a name"
    )
    kubernetes_namespace: str = Field(
        "", max_length=63, description="Namespace of the workers' pods; default: the router's own"
    )
    prefill_selector: str = Field(
        "epserve.io/role=prefill", min_length=1, description="Label selector of prefill pods"
    )
    decode_selector: str = Field(
        "epserve.io/role=decode", min_length=1, description="Label selector of decode pods"
    )
    worker_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="gRPC port of pods that have no container port named grpc; 0: there are none",
    )
    kubernetes_api: Annotated[str, AfterValidator(_check_url)] = Field(
        "",
        description="URL of the API server (such as that of kubectl proxy), without login; "
        "default: the service account's, or what kubeconfig says",
    )
    kubernetes_reconcile_seconds: float = Field(
        30.0, ge=1, le=3600, description="Time between two full lists of pods"
    )

    # ---- assignment

    max_waiting: int = Field(256, ge=0, description="Assign calls that may wait for room")
    max_wait_seconds: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Longest time a request waits for room before its first token",
    )
    status_interval_ms: int = Field(
        20, ge=0, le=1000, description="Shortest time between two status messages of a worker"
    )
    silence_seconds: float = Field(
        3.0, gt=1, le=60, description="A worker that says nothing for so long is dead"
    )
    max_backoff_seconds: float = Field(
        0.5, gt=0, le=60, description="Longest pause between attempts to reach a worker"
    )
    pending_seconds: float = Field(
        5.0, gt=0, le=60, description="An assignment its worker has not seen by then is forgotten"
    )
    prefix_index_pages: int = Field(
        65536, ge=0, description="Prompt pages remembered for each prefill worker"
    )
    admin_token_file: TokenFile | None = Field(
        None,
        description="File with the word that operators' calls must carry as `authorization: "
        "Bearer WORD`; read again when it changes; default: anybody may call",
    )
    stop_seconds: float = Field(3.0, ge=0, le=60, description="Time for running calls on SIGTERM")

    prefix_affinity_weight: float = Field(0.5, ge=0, description="Prefill score: prefix_affinity")
    load_weight: float = Field(1.0, ge=0, description="Prefill score: load")
    free_pages_weight: float = Field(1.0, ge=0, description="Decode score: free_pages")
    free_slots_weight: float = Field(1.0, ge=0, description="Decode score: free_slots")

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        given = {"static": (self.prefill, self.decode), "dns": (self.prefill_dns, self.decode_dns)}
        for kind, (prefill, decode) in given.items():
            if (prefill or decode) and self.discovery != kind:
                suffix = "-dns" if kind == "dns" else ""
                raise ValueError(
                    f"--prefill{suffix} and --decode{suffix} need --discovery {kind}, "
                    f"not {self.discovery}"
                )
            if both := sorted(set(prefill) & set(decode)):
                raise ValueError(f"{both[0]} cannot be both prefill and decode")
        if self.discovery == "dns" and not (self.prefill_dns or self.decode_dns):
            raise ValueError("--discovery dns needs --prefill-dns and --decode-dns")
        return self

    @property
    def weights(self) -> dict[str, dict[str, float]]:
        """By role, then by name of `router.scheduling.scorers`."""
        return {
            "prefill": {"prefix_affinity": self.prefix_affinity_weight, "load": self.load_weight},
            "decode": {"free_pages": self.free_pages_weight, "free_slots": self.free_slots_weight},
        }
