"""API keys: who may ask, under which name, and how much.

A key file has one key a line, blank lines and # comments aside:

    KEY [name=NAME] [requests_per_minute=N] [tokens_per_minute=N]

KEY is the key itself or `sha256:` and the 64 hexadecimal digits of its hash. Limits that a line
does not name are those of the settings; 0 is none. A changed file is read again within a second;
one that has become unreadable changes nothing and is complained about.
"""

import asyncio
import hmac
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from core.log import get_logger
from gateway.rate_limit import Limits

log = get_logger("gateway.api_keys")

LOOK_SECONDS = 1.0
HASH_PREFIX = "sha256:"
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
NUMBER = re.compile(r"[0-9]{1,12}")
LIMIT_NAMES = frozenset(Limits._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Who asks. `name` is for logs and rate limits, and tells nothing about the key."""

    name: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    client: Client


class ApiKeys:
    """All keys. Without a file and without `keys`, everybody is let in as one client."""

    def __init__(self, *, file: Path | None, keys: Iterable[str], limits: Limits) -> None:
        """Raises ValueError for a line that makes no sense, and OSError for a missing file."""
        self._file = file
        self._limits = limits
        self._fixed = [_parse(key, limits, "the API keys") for key in keys]
        self._seen = _signature(file)
        self._keys = [*self._fixed, *_read(file, limits)]
        self._everybody = Client(name="everybody", limits=limits)

    @property
    def is_open(self) -> bool:
        return self._file is None and not self._fixed

    def find(self, authorization: str) -> Client | None:
        """The client of an Authorization header ("Bearer KEY"), None for an unknown key.

        Takes as long for a wrong key as for a right one.
        """
        if self.is_open:
            return self._everybody
        scheme, _, key = authorization.partition(" ")
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Client | None = None
        for one in self._keys:
            if hmac.compare_digest(one.digest, digest):
                found = one.client
        return found if scheme.lower() == "bearer" else None

    async def watch(self) -> None:
        """Reads the file again when it changes, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            self.reload()

    def reload(self) -> None:
        """One look at the file."""
        try:
            signature = _signature(self._file)
            if signature == self._seen:
                return
            self._seen = signature
            keys = _read(self._file, self._limits)
        except (OSError, ValueError) as error:
            if self._seen is not None:
                log.error("API keys not read again", reason=str(error))
                self._seen = None
            return
        self._keys = [*self._fixed, *keys]
        log.info("API keys read again", num_keys=len(self._keys))


def _signature(file: Path | None) -> tuple[int, int, int] | None:
    if file is None:
        return None
    status = os.stat(file)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(file: Path | None, limits: Limits) -> list[_Key]:
    if file is None:
        return []
    keys = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            keys.append(_parse(text, limits, f"{file.name}, line {number}"))
    return keys


def _parse(text: str, limits: Limits, where: str) -> _Key:
    """Never repeats what it cannot read: it may be a key."""
    key, *fields = text.split()
    if key.startswith(HASH_PREFIX):
        try:
            digest = bytes.fromhex(key.removeprefix(HASH_PREFIX))
        except ValueError:
            digest = b""
        if len(digest) != sha256().digest_size:
            raise ValueError(f"{where}: {HASH_PREFIX} needs 64 hexadecimal digits")
    else:
        digest = sha256(key.encode()).digest()
    name = f"key-{sha256(digest).hexdigest()[:8]}"
    values = limits._asdict()
    for field in fields:
        left, _, right = field.partition("=")
        if left == "name" and NAME.fullmatch(right):
            name = right
        elif left in LIMIT_NAMES and NUMBER.fullmatch(right):
            values[left] = int(right)
        else:
            raise ValueError(f"{where}: what follows a key is name=, {'=, '.join(Limits._fields)}=")
    return _Key(digest, Client(name=name, limits=Limits(**values)))
