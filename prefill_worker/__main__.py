"""The front of a prefill worker: `python -m prefill_worker --model FOLDER`."""

import sys

import epserve_start.check  # noqa: F401 - before a foreign package is imported as ours
import core.first_process  # noqa: F401 - before all that takes its time
from engine.process.settings import WorkerSettings
from engine.server.worker_server import RoleService, run_worker
from prefill_worker.service import PrefillService
from proto import generate_pb2, generate_pb2_grpc

ROLE = RoleService(
    "prefill",
    PrefillService,
    generate_pb2_grpc.add_PrefillServicer_to_server,
    generate_pb2,
    "Prefill",
)

if __name__ == "__main__":
    sys.exit(run_worker(WorkerSettings.parse(sys.argv[1:]), ROLE))
