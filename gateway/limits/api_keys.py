"""API keys: who may ask, under which name, and how much.

A key file has one key a line, blank lines and # comments aside:

    KEY [name=NAME] [requests_per_minute=N] [tokens_per_minute=N] [max_priority=N]

KEY is the key itself or `sha256:` and the 64 hexadecimal digits of its hash. What a line does not
name is as the settings say; 0 requests or tokens are no limit. A changed file is read again within
a second; one that has become unreadable changes nothing but is logged.
"""

import asyncio
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from core.file_version import file_version
from core.log import get_logger
from gateway.limits.rate_limit import Limits

log = get_logger("gateway.api_keys")

LOOK_SECONDS = 1.0
HASH_PREFIX = "sha256:"
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
NUMBER = re.compile(r"[0-9]{1,12}")
MAX_PRIORITY = "max_priority"
EVERYBODY = "everybody"  # the one client, where there are no keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Who asks. `name` is for logs and rate limits, and tells nothing about the key. Requests of
    `max_priority` and below it are taken; None: of any priority."""

    name: str
    limits: Limits
    max_priority: int | None


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    client: Client


class ApiKeys:
    """All keys. Without a file and without `keys`, everybody is let in as one client."""

    def __init__(
        self, *, file: Path | None, keys: Iterable[str], limits: Limits, max_priority: int = 0
    ) -> None:
        """`limits` and `max_priority` are those of keys that do not name their own. Raises
        ValueError for a line that makes no sense, and OSError for a missing file."""
        self._file = file
        self._usual = Client(name="", limits=limits, max_priority=max_priority)
        self._fixed = [_parse(key, self._usual, "the API keys") for key in keys]
        self._seen = file and file_version(file)
        self._keys = [*self._fixed, *_read(file, self._usual)]
        self._everybody = Client(name=EVERYBODY, limits=limits, max_priority=None)

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
        version = self._file and file_version(self._file)
        if version == self._seen:
            return
        self._seen = version
        try:
            keys = _read(self._file, self._usual)
        except (OSError, ValueError) as error:
            log.error("API keys not read again", reason=str(error))
            return
        self._keys = [*self._fixed, *keys]
        log.info("API keys read again", num_keys=len(self._keys))


def _read(file: Path | None, usual: Client) -> list[_Key]:
    if file is None:
        return []
    keys = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            keys.append(_parse(text, usual, f"{file.name}, line {number}"))
    return keys


def _parse(text: str, usual: Client, where: str) -> _Key:
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
    values = {**usual.limits._asdict(), MAX_PRIORITY: usual.max_priority or 0}
    for field in fields:
        left, _, right = field.partition("=")
        if left == "name" and NAME.fullmatch(right):
            name = right
        elif left in values and NUMBER.fullmatch(right):
            values[left] = int(right)
        else:
            raise ValueError(f"{where}: what follows a key is name=, {'=, '.join(values)}=")
    max_priority = values.pop(MAX_PRIORITY)
    return _Key(digest, Client(name=name, limits=Limits(**values), max_priority=max_priority))
