"""The front of a decode worker: `python -m decode_worker --model FOLDER --listen HOST:PORT`."""

import sys

import epserve_start.check  # noqa: F401 - before a foreign package is imported as ours
import core.first_process  # noqa: F401 - before all that takes its time
from decode_worker.service import DecodeService
from engine.process.settings import WorkerSettings
from engine.server.worker_server import RoleService, run_worker
from proto import generate_pb2, generate_pb2_grpc

ROLE = RoleService(
    "decode",
    DecodeService,
    generate_pb2_grpc.add_DecodeServicer_to_server,
    generate_pb2,
    "Decode",
)

if __name__ == "__main__":
    sys.exit(run_worker(WorkerSettings.parse(sys.argv[1:]), ROLE))
