"""Responses that later requests may refer to, in a database that the gateway's processes share.

Bounded in bytes: the oldest make room for new ones. Each is only there for the API key that it was
made with. A row's key is the number of bytes ever stored up to its end, so that what has to make
room is a range of keys.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import PreviousNotFound
from core.log import get_logger
from gateway.responses_api.input_items import ITEMS, AnyItem

log = get_logger("gateway.response_store")

# Other processes' writes take microseconds.
BUSY_SECONDS = 1.0
TABLE = """CREATE TABLE IF NOT EXISTS responses (
    bytes_until INTEGER PRIMARY KEY, id TEXT UNIQUE, client TEXT, response BLOB, items BLOB
)"""


class StoredResponse(NamedTuple):
    """`response` is the object as it was told, `items` the conversation up to its end."""

    response: bytes
    items: list[AnyItem]


class ResponseStore:
    """`path` None: in this process's memory alone. `max_bytes` 0: nothing is kept."""

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        if path is not None:
            path.touch(mode=0o600)
        self._database = sqlite3.connect(
            path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None
        )
        # What a crash loses is lost with the processes anyway.
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=OFF")
        self._database.execute(TABLE)

    def close(self) -> None:
        self._database.close()

    def put(
        self,
        id_: str,
        client: str,
        items: Sequence[AnyItem],
        response: bytes,
        output: Sequence[dict[str, Any]],
    ) -> None:
        """Keeps `response`, whose output comes after `items`, unless it is larger than all that may
        be kept."""
        content = ITEMS.dump_json([*items, *ITEMS.validate_python(output)], exclude_none=True)
        num_bytes = len(response) + len(content)
        if num_bytes > self.max_bytes:
            return
        try:
            with self._writing():
                (last,) = self._database.execute(
                    "SELECT coalesce(max(bytes_until), 0) FROM responses"
                ).fetchone()
                until = last + num_bytes
                self._database.execute(
                    "DELETE FROM responses WHERE bytes_until <= ?", (until - self.max_bytes,)
                )
                self._database.execute(
                    "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
                    (until, id_, client, response, content),
                )
        except sqlite3.Error as error:  # the client has its reply all the same
            log.warning("response not stored", id=id_, reason=str(error))

    def get(self, id_: str, client: str) -> StoredResponse | None:
        """None for one that is not there any more, or is another client's."""
        row = self._database.execute(
            "SELECT response, items FROM responses WHERE id = ? AND client = ?", (id_, client)
        ).fetchone()
        return row and StoredResponse(row[0], ITEMS.validate_json(row[1]))

    def before(self, id_: str | None, client: str) -> list[AnyItem]:
        """The conversation that a request goes on from. Raises PreviousNotFound."""
        if id_ is None:
            return []
        stored = self.get(id_, client)
        if stored is None:
            raise PreviousNotFound(
                f"Previous response with id {id_!r} not found.", param="previous_response_id"
            )
        return stored.items

    def delete(self, id_: str, client: str) -> bool:
        """Whether it was there."""
        cursor = self._database.execute(
            "DELETE FROM responses WHERE id = ? AND client = ?", (id_, client)
        )
        return cursor.rowcount > 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
