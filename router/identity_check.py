"""What a process may say of itself. Pure."""

from core.errors import InvalidRequest
from core.printable import printable
from proto.worker_pb2 import ProcessIdentity

# Characters; an address has a host name in it.
MOST_CHARACTERS = {"name": 128, "address": 300, "epoch": 128, "version": 128}


def check_identity(identity: ProcessIdentity) -> None:
    """It goes to logs and operators: it is short, and can be printed. Raises InvalidRequest."""
    for field, most in MOST_CHARACTERS.items():
        text: str = getattr(identity, field)
        if len(text) > most:
            raise InvalidRequest(f"{field} has more than {most} characters", param="identity")
        if not text.isprintable():
            problem = f"{field} {printable(text)} has letters that cannot be printed"
            raise InvalidRequest(problem, param="identity")
