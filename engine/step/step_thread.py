"""A thread that computes steps, one after the other, for a CPU rank that goes on meanwhile."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class StepThread:
    """Jobs raise nothing. NOTE: a daemon thread, for a rank that dies of an error must not wait
    for a step which may wait for a peer."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Returns when all jobs are done."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
