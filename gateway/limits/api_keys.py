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
from functools import partial
from hashlib import sha256
from pathlib import Path

from core.watched_files import WatchedFiles
from gateway.limits.rate_limit import Limits

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
        ValueError for a line that makes no sense, and for a file that cannot be read."""
        usual = Client(name="", limits=limits, max_priority=max_priority)
        self._fixed = [_parse(key, usual, "the API keys") for key in keys]
        self._file = file and WatchedFiles("list of API keys", (file,), partial(_read, file, usual))
        self._everybody = Client(name=EVERYBODY, limits=limits, max_priority=None)
        self.reload()

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
        self._keys = [*self._fixed, *(self._file.current() if self._file else ())]


def _read(file: Path, usual: Client) -> list[_Key]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    keys = []
    for number, line in enumerate(lines, start=1):
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
