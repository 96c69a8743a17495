"""The NIXL and UCX libraries, set up for this process.

UCX reads its settings from the environment when the first agent is made; what the user has
set there wins over ours:

    UCX_TCP_CONN_NB=y      connect in the background: a peer whose host does not answer
                           would else hold `submit` for the kernel's whole SYN timeout
    UCX_TCP_KEEPIDLE etc.  a host that vanished is noticed after 5 s instead of 16 s
    UCX_MODULES=^efa       the module for Amazon's adapters brings the system's libnl in beside
                           NIXL's own, where libefa is installed: the process would end with a
                           segmentation fault

Transports are left to UCX. Between processes of one machine it takes CMA
(process_vm_writev) for bytes and TCP over loopback for notifications; where CMA is
forbidden, TCP for both; CUDA IPC and RDMA where there are such devices. UCX listens on every
network device, unless UCX_NET_DEVICES names some: `lo` for a worker that listens on loopback only.
"""

import logging
import os

from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config

UCX_DEFAULTS: dict[str, str] = {
    "UCX_TCP_CONN_NB": "y",
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_MODULES": "^efa",
}

# All that the library raises; these classes have no base of their own below Exception.
NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    value
    for value in vars(_bindings).values()
    if isinstance(value, type) and issubclass(value, Exception)
)


def create_agent(name: str, *, loopback: bool = False) -> nixl_agent:
    """An agent with the UCX backend and without a progress thread, in about 0.4 s;
    `loopback`: for peers on this machine only.

    NOTE: NIXL's progress thread spins: it takes a whole core even when nothing moves, and on
    a machine with as many cores as ranks it makes every transfer milliseconds slower.

    Raises one of NIXL_ERRORS, or RuntimeError when the library lacks its UCX plugin.
    """
    defaults = UCX_DEFAULTS | ({"UCX_NET_DEVICES": "lo"} if loopback else {})
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    _quiet()
    config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = nixl_agent(name, config)
    if "UCX" not in agent.backends:
        raise RuntimeError("this installation of nixl has no UCX plugin")
    return agent


def _quiet() -> None:
    """Log lines of NIXL's Python layer go where ours go, not to its own handler on stdout."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.WARNING)
