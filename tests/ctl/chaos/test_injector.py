"""Faults done to processes, and undone; clusters that are not ours are left alone."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import ctl.chaos.injector
from ctl.chaos.clients import Clients
from ctl.chaos.faults import Fault, Kind, read_scenario
from ctl.chaos.injector import Injected, Injector
from ctl.chaos.limits import no_new_descriptors, no_writes
from ctl.local.own_cluster import NotOurs, OwnCluster, OwnProcess
from ctl.main import app
from loadgen.openai_stream import Target
from tests.eventually import eventually
from tests.free_ports import free_port

# Stands in for `python -m MODULE --name NAME ...`: says that it is there, answers each line.
SOURCE = """
import os, sys, socket
server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--listen") + 1][10:])))
while True:
    client = server.accept()[0]
    try:
        name = client.recv(100).decode()
        if name == "open":
            os.close(os.open("/dev/null", os.O_RDONLY))
        elif name:
            with open(name, "w") as file:
                file.write("x")
        client.send(b"done")
    except OSError as error:
        client.send(error.strerror.encode())
    client.close()
"""
