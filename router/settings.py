"""Settings of the router process."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from core.settings import HostPorts, ProcessSettings


class RouterSettings(ProcessSettings):
    """Assigns requests to pairs of a prefill and a decode worker."""

    model_config = SettingsConfigDict(cli_prog_name="router")

    prefill: HostPorts = Field((), description="Prefill workers: host:port,host:port,...")
    decode: HostPorts = Field((), description="Decode workers: host:port,host:port,...")

    max_waiting: int = Field(256, ge=0, description="Assign calls that may wait for room")
    max_wait_seconds: float = Field(
        10.0, gt=0, le=3600, description="Longest time an Assign call waits for room"
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
    stop_seconds: float = Field(3.0, ge=0, le=60, description="Time for running calls on SIGTERM")

    prefix_affinity_weight: float = Field(0.5, ge=0, description="Prefill score: prefix_affinity")
    load_weight: float = Field(1.0, ge=0, description="Prefill score: load")
    free_pages_weight: float = Field(1.0, ge=0, description="Decode score: free_pages")
    free_slots_weight: float = Field(1.0, ge=0, description="Decode score: free_slots")

    @property
    def prefill_weights(self) -> dict[str, float]:
        """Weight by name of `router.scorers.PREFILL_SCORERS`."""
        return {"prefix_affinity": self.prefix_affinity_weight, "load": self.load_weight}

    @property
    def decode_weights(self) -> dict[str, float]:
        """Weight by name of `router.scorers.DECODE_SCORERS`."""
        return {"free_pages": self.free_pages_weight, "free_slots": self.free_slots_weight}
