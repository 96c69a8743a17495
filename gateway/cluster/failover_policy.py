"""The search for a pair of workers that brings a choice one token further.

A pair that fails counts, up to `max_attempts`; a worker that leaves as planned does not: a restart
of all workers may move a choice as often as there are workers. Without a pair the search goes on
for `failover_seconds`, while a worker that leaves as planned is being replaced for
`replacement_seconds`, without a router for `router_seconds`. Full workers refuse what has not
begun; a request whose client has tokens, of any choice, waits for room until its deadline.
"""

from dataclasses import dataclass, field

from core.errors import Cancelled, Draining, EpserveError, Mismatch, Overloaded, Unavailable
from rpc.client import Disconnected

FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 0.4
# As many as routers take; the latest ones matter.
MAX_EXCLUDED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverBounds:
    """As in the settings of the same names."""

    max_attempts: int
    failover_seconds: float
    replacement_seconds: float
    router_seconds: float


@dataclass(slots=True)
class FailoverPolicy:
    """A new one with each token. Times are on the caller's clock, in seconds."""

    bounds: FailoverBounds
    has_begun: bool = False  # the client has tokens of this request
    excluded_epochs: list[str] = field(default_factory=list)
    _num_attempts: int = 0
    _refusal: Overloaded | None = None
    # When something first went wrong since workers were last there.
    _since: float | None = None
    _patience_seconds: float = 0.0
    _wait_seconds: float = FIRST_WAIT_SECONDS

    def note_begun(self) -> None:
        """The client has tokens from now on, of another choice: full workers are waited for."""
        self.has_begun = True
        self._refusal = None

    def note_failure(self, error: EpserveError, blamed_epoch: str, now: float) -> None:
        """A pair has failed. Raises what the client is to be told when no other is to be
        tried."""
        match error:
            case Overloaded() if self.has_begun:
                self._note_presence()
            case Overloaded():
                if self._refusal is not None:
                    raise error
                self._refusal = error
            case Draining():
                self._be_patient(self.bounds.replacement_seconds, now)
            case Unavailable() | Mismatch() | Cancelled():
                self._num_attempts += 1
                if self._num_attempts >= self.bounds.max_attempts:
                    raise _told(error, "the workers cannot be reached")
                self._be_patient(self.bounds.failover_seconds, now)
            case _:
                raise error
        self.excluded_epochs.append(blamed_epoch)
        del self.excluded_epochs[:-MAX_EXCLUDED]

    def note_no_pair(
        self, error: EpserveError, now: float, *, router_is_there: bool = True
    ) -> float:
        """The router has none, or is not there. Returns after how many seconds to ask again, or
        raises what the client is to be told."""
        if self._refusal is not None and isinstance(error, Unavailable | Overloaded):
            raise self._refusal  # there is no other pair, and this one is full
        if isinstance(error, Overloaded) and self.has_begun:
            self._note_presence()
            return self._next_wait()
        if not isinstance(error, Unavailable):
            raise error
        if isinstance(error, Draining):
            self._be_patient(self.bounds.replacement_seconds, now)
        elif router_is_there:
            self._be_patient(self.bounds.failover_seconds, now)
        else:
            self._be_patient(self.bounds.router_seconds, now)
        assert self._since is not None
        seconds_left = self._since + self._patience_seconds - now
        if seconds_left <= 0:
            raise _told(error, "no router can be reached")
        return min(self._next_wait(), seconds_left)

    def _next_wait(self) -> float:
        seconds = self._wait_seconds
        self._wait_seconds = min(2 * seconds, LONGEST_WAIT_SECONDS)
        # Blame fades: a worker that failed this request may be the only one there is.
        self.excluded_epochs.clear()
        return seconds

    def _note_presence(self) -> None:
        """Workers are there, but full: patience is for when there are none."""
        self._since = None
        self._patience_seconds = 0.0

    def _be_patient(self, seconds: float, now: float) -> None:
        if self._since is None:
            self._since = now
        self._patience_seconds = max(self._patience_seconds, seconds)


def _told(error: EpserveError, unreached: str) -> EpserveError:
    """A peer that left, cancelled or did not fit was unavailable to the client, who need not know
    its address."""
    if isinstance(error, Disconnected):
        return Unavailable(unreached)
    if isinstance(error, Unavailable) and not isinstance(error, Draining):
        return error
    return Unavailable(error.message)
