"""A process's identity as it is told to others."""

from core.process import Identity
from core.version import software_version
from proto import worker_pb2


def identity_message(identity: Identity) -> worker_pb2.ProcessIdentity:
    """`core.process.Identity` as its message. Raises ValueError for an unknown role."""
    return worker_pb2.ProcessIdentity(
        role=worker_pb2.Role.Value(f"ROLE_{identity.role.upper()}"),
        name=identity.name,
        address=identity.address,
        epoch=identity.epoch,
        pid=identity.pid,
        started_at=identity.started_at,
        version=software_version(),
    )
