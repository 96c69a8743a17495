"""The certificate that clients are shown, renewed while the gateway serves.

A changed file is noticed within a second; handshakes from then on use the new certificate, open
connections stay as they are. Files that do not fit together, as while one of them is written,
change nothing but are logged.
"""

import asyncio
import ssl
from pathlib import Path

from core.watched_files import WatchedFiles

LOOK_SECONDS = 1.0


class Certificate:
    """A chain and its private key, both PEM files."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises ValueError for files that cannot be read, or do not belong together."""
        self._chain = chain
        self._key = key
        self._files = WatchedFiles("certificate", (chain, key), self._load)
        self._current = self._files.current()
        self.context = self._load()  # for the listener, as long as it listens
        self.context.sni_callback = self._hand_over  # asked at each handshake, with a name or not

    async def watch(self) -> None:
        """Reads the files again when they change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.reload()

    def reload(self) -> None:
        """One look at the files."""
        self._current = self._files.current()

    def _hand_over(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # The password: a key that needs one is refused instead of asking at the terminal.
            context.load_cert_chain(self._chain, self._key, password="")
        except OSError as error:
            raise ValueError(f"certificate {self._chain}, key {self._key}: {error}") from error
        return context
