"""One started process: its log, its group, its end."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from ctl.base.die_with_parent import dying_with_us
from ctl.base.python_process import package_environment
from ctl.local.process_spec import ProcessSpec


class Child:
    """A running process in a process group of its own, so that Ctrl-C reaches only us."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, spec: ProcessSpec, log: Path) -> "Child":
        """Starts it with its output appended to `log`; it dies with us. Raises OSError."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *dying_with_us(spec.argv()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=package_environment() | dict(spec.environment),
                start_new_session=True,
            )
        return cls(process)

    async def wait(self) -> int:
        """Its exit status (negative: signal); what it had started is killed by then."""
        status = await self._process.wait()
        # Ranks die with their front, but a wedged one must not outlive it by a second.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return status

    def terminate(self) -> None:
        """Asks it to leave; what it started is its own business."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Ends it and everything in its process group, now."""
        if self._process.returncode is not None:
            return  # `wait` has seen to the group, and its number may be another's by now
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
