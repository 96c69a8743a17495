"""Settings of the gateway process."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from core.settings import HostPort, ProcessSettings


def _check_model(path: Path) -> Path:
    path = path.expanduser()
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ValueError(f"no model folder (it has no {name})")
    return path.resolve()


class GatewaySettings(ProcessSettings):
    """Everything a gateway can be told."""

    listen: HostPort = Field(
        "127.0.0.1:8000", description="host:port to serve HTTP on, port 0: a free one"
    )
    router: HostPort = Field(description="host:port of the router")
    model: Annotated[Path, AfterValidator(_check_model)] = Field(
        description="Checkpoint folder: config.json, tokenizer.json, tokenizer_config.json"
    )
    served_model_name: str = Field(
        "", max_length=256, description="Name that requests use; default: name of the folder"
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="Where temperature, top_p, top_k and min_p come from when a request is "
        "silent: the folder's generation_config.json, or OpenAI's API",
    )

    reasoning_parser: Literal["auto", "off"] = Field(
        "auto",
        description="auto: in chats, text between <think> and </think> becomes "
        "reasoning_content if both are tokens of the model; off: it stays in the text",
    )

    # ---- bounds
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="Larger bodies get 413")
    body_timeout_seconds: float = Field(
        30.0, gt=0, description="A body that has not arrived by then gets 408"
    )
    max_inflight: int = Field(
        4096, ge=1, description="Requests at once; more get 429 with Retry-After"
    )
    max_choices: int = Field(128, ge=1, description="Prompts times n of one request")
    request_timeout_seconds: float = Field(
        600.0, gt=0, description="Deadline of a request; x-request-timeout may shorten it"
    )

    # ---- failures
    max_attempts: int = Field(
        4, ge=1, description="Worker pairs tried in a row without one new token"
    )
    failover_seconds: float = Field(
        1.5, gt=0, description="How long to look for a pair while there is none"
    )
    grace_seconds: float = Field(
        2.5, ge=0, description="Running requests may finish for this long after SIGTERM"
    )
