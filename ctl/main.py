"""The operator's command line: starts clusters, looks at them, changes and measures them.

Data goes to stdout, words about trouble to stderr; exit status 0 is success, 1 failure, 2 usage.
"""

import typer

import epserve_start.check  # noqa: F401 - before a foreign package is imported as ours
import ctl.base.output  # noqa: F401 - before grpc: sets its verbosity
from ctl import probe
from ctl.admin.drain import drain, undrain
from ctl.admin.expert_load import expert_load
from ctl.admin.explain import explain
from ctl.admin.log_level import logs_level
from ctl.admin.process_config import config
from ctl.admin.rebalance_experts import rebalance_experts
from ctl.admin.status import status
from ctl.admin.workers import workers
from ctl.bench import bench
from ctl.chaos.chaos import chaos
from ctl.doctor.doctor import doctor
from ctl.local.up import up
from ctl.plan.plan import plan
from ctl.quantize import quantize

app = typer.Typer(
    name="ctl",
    help="Operates epserve: disaggregated serving of DeepSeek-V3-architecture models.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
for command, example in (
    (plan, "ctl plan --model DeepSeek-V3 --gpu h200 --nodes 2"),
    (up, "ctl up --decode-workers 2 --port 8000"),
    (status, "ctl status --router router:8001 --output json"),
    (workers, "ctl workers --namespace inference"),
    (explain, "ctl explain chatcmpl-4f1d0c8be2a94f7c8a15d9b3"),
    (config, "ctl config decode-0"),
    (drain, "ctl drain decode-0 --wait --grace 30"),
    (undrain, "ctl undrain decode-0"),
    (logs_level, "ctl logs-level debug decode-0"),
    (expert_load, "ctl expert-load --map"),
    (rebalance_experts, "ctl rebalance-experts --apply --max-moves 64"),
    (quantize, "ctl quantize --model /models/DeepSeek-V3 --output /models/DeepSeek-V3-W4AFP8"),
    (doctor, "ctl doctor --device cuda --model /models/DeepSeek-V3"),
    (bench, "ctl bench --concurrency 16 --num-prompts 128"),
    (chaos, "ctl chaos --seed 7 --count 50 --rate 0.5"),
):
    app.command(epilog=f"Example: {example}")(command)
app.add_typer(probe.app, name="probe")
