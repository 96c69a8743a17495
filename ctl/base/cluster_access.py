"""What a command shows to processes of a cluster, and how `ctl` finds what `ctl up` has made."""

import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from core.address import is_loopback, parse_address

# Of the folder of a `ctl up`, among the temporary ones.
RUN_FOLDER_PREFIX = "epserve-"


def _option(help: str, variable: str) -> Any:  # noqa: ANN401 - as typer has it
    return typer.Option(
        help=help, envvar=variable, show_default=False, rich_help_panel="Cluster (docs/security.md)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """As the flags of processes. Each field is an option; its variable is the processes' own."""

    cluster_token_file: Annotated[
        Path | None,
        _option(
            "File with the cluster's token; default: `ctl up` makes one, other commands find it",
            "EPSERVE_CLUSTER_TOKEN_FILE",
        ),
    ] = None
    cluster_tls_cert: Annotated[
        Path | None,
        _option("Certificate chain to show, PEM; with key and CA", "EPSERVE_CLUSTER_TLS_CERT"),
    ] = None
    cluster_tls_key: Annotated[
        Path | None, _option("Its private key, PEM", "EPSERVE_CLUSTER_TLS_KEY")
    ] = None
    cluster_tls_ca: Annotated[
        Path | None,
        _option("Who signs the certificates of the cluster, PEM", "EPSERVE_CLUSTER_TLS_CA"),
    ] = None
    cluster_tls_name: Annotated[
        str, _option("DNS name that they have in common", "EPSERVE_CLUSTER_TLS_NAME")
    ] = "epserve"

    def environment(self) -> dict[str, str]:
        """What tells the same to processes that are started."""
        names = ClusterAccess.__dataclass_fields__
        given = {name: getattr(self, name) for name in names}
        return {_variable(name): str(value) for name, value in given.items() if value}

    @staticmethod
    def of_environment(environment: Mapping[str, str]) -> "ClusterAccess":
        """What a process that was started with it has been told."""
        given: dict[str, Any] = {
            name: value if name == "cluster_tls_name" else Path(value)
            for name in ClusterAccess.__dataclass_fields__
            if (value := environment.get(_variable(name)))
        }
        return ClusterAccess(**given)


def make_token(run_folder: str, router: str) -> Path:
    """A new token for the cluster of the router at `router`, readable by this user alone."""
    file = Path(run_folder, _file_name(router))
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(secrets.token_urlsafe(32) + "\n")
    return file


def find_token(router: str) -> Path | None:
    """That of the `ctl up` of this user, on this machine, whose router has the port of `router`;
    the youngest, as one that was killed leaves its own behind. Raises ValueError for no address."""
    if not is_loopback(parse_address(router).host):
        return None
    found = []
    for file in Path(tempfile.gettempdir()).glob(f"{RUN_FOLDER_PREFIX}*/{_file_name(router)}"):
        status = file.lstat()
        # Anybody can make such a folder: another user's word is not to be sent in ours' place.
        if status.st_uid == os.getuid():
            found.append((status.st_mtime_ns, file))
    return max(found)[1] if found else None


def _variable(name: str) -> str:
    return f"EPSERVE_{name.upper()}"


def _file_name(router: str) -> str:
    return f"cluster-token-{parse_address(router).port}"
