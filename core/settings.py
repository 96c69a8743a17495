"""Settings of a process: one frozen class, read from flags, then EPSERVE_* variables.

    class RouterSettings(ProcessSettings):
        max_waiting: int = Field(256, ge=0, description="Assign calls that may wait for room")

    settings = RouterSettings.parse(sys.argv[1:])     # --max-waiting 512

A process with a wrong flag or value says so on stderr and exits with status 2.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, NoDecode, SettingsConfigDict, SettingsError

from core.address import Address, is_loopback, parse_address
from core.log import LogFormat
from core.printable import check_printable
from core.token_file import TokensFile


def split_commas(value: Any) -> Any:  # noqa: ANN401 - pydantic hands over whatever it got
    """ "a,b" or ["a", "b,c"] as a tuple of texts; anything else as it is."""
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
        return tuple(piece.strip() for part in parts for piece in part.split(",") if piece.strip())
    return parts


# host:port; port 0 takes a free one where the process listens.
HostPort = Annotated[str, AfterValidator(lambda text: str(parse_address(text)))]
# host:port,host:port,... in flags and variables alike; a flag may also be repeated.
HostPorts = Annotated[tuple[HostPort, ...], NoDecode, BeforeValidator(split_commas)]


class ProcessSettings(BaseSettings):
    """What every process of the cluster can be told. Subclasses add fields, nothing else."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="EPSERVE_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    name: Annotated[str, AfterValidator(check_printable)] = Field(
        "", max_length=128, description="Name of this process in logs and status; default: its role"
    )
    listen: HostPort = Field("127.0.0.1:0", description="host:port to serve on, port 0: a free one")
    advertise: str = Field(
        "",
        max_length=253,
        pattern=r"^[0-9A-Za-z_.:-]*$",
        description="Host that others reach this process by, where --listen names none such as "
        "0.0.0.0; default: that of --listen",
    )
    metrics_port: int = Field(
        -1, ge=-1, le=65535, description="Port of /metrics on the same host, 0: a free one, -1: off"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged"
    )
    log_format: LogFormat = Field("console", description="Format of log lines")
    otlp_endpoint: str = Field(
        "",
        max_length=1024,
        description="Collector that traces go to by OTLP over gRPC: host:port, http://... or "
        "https://... (TLS); empty: tracing is off",
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Part of the traces that begin here that is recorded"
    )

    # ---- among processes of the cluster (docs/security.md)
    cluster_token_file: TokensFile | None = Field(
        None,
        description="File with the word that all calls between processes of the cluster carry, the "
        "same for all of them; of several, one a line, the first is sent and all are taken; read "
        "again when it changes",
    )
    cluster_tls_cert: Path | None = Field(
        None,
        description="Certificate chain that this process shows to others of the cluster, PEM: "
        "calls between processes use TLS on both sides; read again when it changes, as are "
        "--cluster-tls-key and --cluster-tls-ca, which it needs",
    )
    cluster_tls_key: Path | None = Field(None, description="Its private key, PEM")
    cluster_tls_ca: Path | None = Field(
        None,
        description="Who signs the certificates of this cluster's processes, and no others, PEM",
    )
    cluster_tls_name: str = Field(
        "epserve",
        max_length=253,
        pattern=r"^[0-9A-Za-z_.-]+$",
        description="DNS name that the certificates of the cluster's processes have in common",
    )

    def address_at(self, port: int) -> str:
        """host:port that others reach this process by when it is bound to `port`."""
        return str(Address(self.advertise or parse_address(self.listen).host, port))

    def public_json(self) -> str:
        """All settings as one JSON object, but for secrets: fields without a `repr`."""
        fields = type(self).model_fields
        values = self.model_dump(mode="json", exclude={n for n in fields if not fields[n].repr})
        return json.dumps(values)

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """From command-line flags (first), environment and defaults. Exits with status 2 and one
        line a problem on stderr when they are not valid."""
        try:
            if not (unknown := [*cls._unknown_flags(argv)]):
                return CliApp.run(cls, cli_args=list(argv))
            sys.stderr.writelines(f"error: {problem}\n" for problem in unknown)
        except ValidationError as error:
            for problem in error.errors():
                if not problem["loc"]:  # about several of them
                    sys.stderr.write(f"error: {problem['msg'].removeprefix('Value error, ')}\n")
                    continue
                flag = "--" + "-".join(str(part) for part in problem["loc"][:1]).replace("_", "-")
                text = problem["msg"].removeprefix("Value error, ")
                sys.stderr.write(f"error: {flag}: {text}{cls._given(problem)}\n")
        except SettingsError as error:
            sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2)

    @classmethod
    def _unknown_flags(cls, argv: Sequence[str]) -> Iterator[str]:
        flags = ["--help"]
        for name, field in cls.model_fields.items():
            flags.append(f"--{name.replace('_', '-')}")
            if bool in (field.annotation, *get_args(field.annotation)):
                flags.append(f"--no-{name.replace('_', '-')}")
        for argument in argv:
            flag = argument.partition("=")[0]
            if flag.startswith("--") and flag not in flags:
                (nearest,) = get_close_matches(flag, flags, n=1, cutoff=0)
                yield f"unknown flag {flag}; the nearest one is {nearest}"

    @classmethod
    def _given(cls, problem: ErrorDetails) -> str:
        """What the setting was, if it was anything: of a missing one the library gives all the
        others. Secrets are not told."""
        field = cls.model_fields.get(str(problem["loc"][0]))
        is_told = problem["type"] != "missing" and (field is None or field.repr)
        return f", got {problem['input']!r}" if is_told else ""


class PeerSettings(ProcessSettings):
    """Of processes that others of the cluster call."""

    insecure_cluster: bool = Field(
        False,
        description="Take calls without the cluster's token, and listen beyond this machine with "
        "neither token nor TLS: whoever reaches the port may then do everything",
    )

    @model_validator(mode="after")
    def _check_reach(self) -> Self:
        is_guarded = self.cluster_token_file is not None or self.cluster_tls_ca is not None
        if not (
            is_guarded or self.insecure_cluster or is_loopback(parse_address(self.listen).host)
        ):
            raise ValueError(
                f"--listen {self.listen}: beyond this machine give --cluster-token-file (best with "
                "--cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca), or "
                "--insecure-cluster where whoever reaches the port may do everything"
            )
        return self
