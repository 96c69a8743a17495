"""Settings of the gateway process."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from core.settings import HostPort, HostPorts, ProcessSettings, split_commas
from gateway.formats.registry import ReasoningParser, ToolParser
from model.tokenizer_file import tokenizer_problem


def _check_model(path: Path) -> Path:
    path = path.expanduser()
    if not (path / "config.json").is_file():
        raise ValueError("no model folder (it has no config.json)")
    if problem := tokenizer_problem(path):
        raise ValueError(f"no model folder that can be served: {problem}")
    return path.resolve()


class GatewaySettings(ProcessSettings):
    """Everything a gateway can be told."""

    listen: HostPort = Field(
        "127.0.0.1:8000", description="host:port to serve HTTP on, port 0: a free one"
    )
    router: HostPorts = Field(
        min_length=1,
        description="Routers: host:port,host:port,...; all addresses of a name count, and are "
        "looked up again every few seconds",
    )
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

    tool_call_parser: ToolParser = Field(
        "auto",
        description="How the model writes calls of tools (see formats.md); auto: as its chat "
        "template does, or as its tokens tell",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="How the model marks its thoughts, which become reasoning_content in chats "
        "if both marks are tokens; auto: as models do that write such calls of tools; off: "
        "thoughts stay in the text",
    )

    sanitize_control_tokens: bool = Field(
        True,
        description="Special tokens that stand in messages and tools of a chat are text to the "
        "model; only those that the chat template writes are tokens",
    )

    # ---- processes
    workers: int = Field(
        1, ge=1, le=256, description="Processes that share the port, one core each"
    )
    shared_folder: Path | None = Field(
        None,
        description="Where processes of one gateway share metrics, rate limits and stored "
        "responses; "
        "--workers takes a temporary folder of its own",
    )

    # ---- who may ask
    api_keys_file: Path | None = Field(
        None,
        description="One key a line, `KEY [name=...] [requests_per_minute=N] "
        "[tokens_per_minute=N] [max_priority=N]`; read again when it changes",
    )
    api_keys: str = Field(
        "", repr=False, description="Keys, separated by commas; better as EPSERVE_API_KEYS"
    )
    guard_all_paths: bool = Field(
        False, description="Ask for a key at /health, /ready, /metrics and /version as well"
    )
    requests_per_minute: int = Field(
        0, ge=0, description="Of one key (without keys: of all together); 0: no limit"
    )
    tokens_per_minute: int = Field(
        0, ge=0, description="Prompt and output tokens of one key; 0: no limit"
    )
    max_priority: int = Field(
        0,
        ge=0,
        description="Highest `priority` that requests of one key may have (without keys: any); "
        "those of higher ones run first",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)] = Field(
        (), description="Origins whose pages may ask, * for any; none: CORS is off"
    )
    allow_cross_site_forms: bool = Field(
        False,
        description="Pages of any origin may post bodies that are not application/json, which "
        "browsers send without asking whether they may",
    )
    tls_cert: Path | None = Field(
        None, description="Certificate chain, PEM; needs --tls-key; read again when it changes"
    )
    tls_key: Path | None = Field(None, description="Private key, PEM; read again when it changes")
    log_prompts: bool = Field(False, description="Log the text of prompts: never by default")

    # ---- bounds
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="Larger bodies get 413")
    body_timeout_seconds: float = Field(
        30.0, gt=0, description="A body that has not arrived by then gets 408"
    )
    max_inflight: int = Field(4096, ge=1, description="Requests at once of one process; more wait")
    max_queued: int = Field(
        1024, ge=0, description="Requests that wait; more get 429 with Retry-After"
    )
    max_queue_seconds: float = Field(
        30.0, gt=0, description="A request that has waited for so long gets 429"
    )
    stored_responses_mib: int = Field(
        64,
        ge=0,
        description="What /v1/responses keeps for `previous_response_id`, of all clients; the "
        "oldest go first; 0: nothing is kept",
    )
    max_choices: int = Field(128, ge=1, description="Prompts times n of one request")
    request_timeout_seconds: float = Field(
        600.0, gt=0, description="Deadline of a request; x-request-timeout may shorten it"
    )

    # Longer than routers let a request wait for room: a refusal after a ping is an event in a
    # stream that began with 200, without a status and a Retry-After of its own. For the same
    # reason nothing is sent while a request waits here: together with max_queue_seconds this is
    # the longest silence, and shorter than the 60 s after which proxies usually hang up.
    ping_seconds: float = Field(
        15.0,
        ge=0,
        description="Streams get a comment after so long without anything, once let in; 0: never",
    )
    reader_stall_seconds: float = Field(
        30.0, gt=0, description="A client that does not read for so long is cut off"
    )
    # Longer than the 60 s for which proxies usually keep a connection: who closes first while the
    # other begins a request on it makes that one fail.
    keep_alive_seconds: int = Field(
        75, ge=1, description="Connections on which nothing was asked for so long are closed"
    )

    # ---- failures
    # A prompt that waits in line after others may be moved many times before its turn; what
    # bounds a request in time is its deadline.
    max_attempts: int = Field(
        16, ge=1, description="Worker pairs tried in a row without one new token"
    )
    failover_seconds: float = Field(
        1.5, gt=0, description="How long to look for a pair while there is none"
    )
    replacement_seconds: float = Field(
        30.0,
        gt=0,
        description="The same while workers leave as planned, and others are being started",
    )
    router_seconds: float = Field(
        5.0, gt=0, description="The same while there is no router that could be asked"
    )
    grace_seconds: float = Field(
        2.5, ge=0, description="Running requests may finish for this long after SIGTERM"
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")
        for name in ("tls_cert", "tls_key", "api_keys_file"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"--{name.replace('_', '-')}: there is no file {path}")
        return self
