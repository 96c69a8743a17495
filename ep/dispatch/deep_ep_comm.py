"""How DeepEP's buffers on all ranks get to know each other: over the group's own connections.

DeepEP takes a process group of torch, through which it sends pickles, or whatever has the three
methods of an MPI communicator that it uses. Only numbers, bytes and nothing travel here.
"""

from array import array

from ep.group.group import EpGroup

_NOTHING, _NUMBER, _BYTES = range(3)
_WORD = 8

Gathered = int | bytearray | None


class DeepEpComm:
    """The names are those of MPI for Python. All ranks make the same calls."""

    def __init__(self, group: EpGroup) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return self._group.rank

    def Get_size(self) -> int:
        return self._group.size

    def allgather(self, own: int | bytes | bytearray | None) -> list[Gathered]:
        """What every rank gave, by rank. Unavailable when a peer is lost."""
        match own:
            case None:
                kind, payload = _NOTHING, b""
            case int():
                kind, payload = _NUMBER, own.to_bytes(_WORD, "little", signed=True)
            case _:
                kind, payload = _BYTES, bytes(own)
        heads = self._group.exchange((kind, len(payload)))
        longest = max(num_bytes for _, num_bytes in heads)
        words = array("q", payload.ljust(-(-longest // _WORD) * _WORD, b"\0"))
        bodies = self._group.exchange(words)
        return [
            _decoded(kind, array("q", body).tobytes()[:num_bytes])
            for (kind, num_bytes), body in zip(heads, bodies, strict=True)
        ]


def _decoded(kind: int, payload: bytes) -> Gathered:
    if kind == _NOTHING:
        return None
    if kind == _NUMBER:
        return int.from_bytes(payload, "little", signed=True)
    return bytearray(payload)
