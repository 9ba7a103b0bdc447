# ruff: noqa: F403 (each module's public names are the package's)
"""The c10d store: torch's TCPStore, its server in one agent's process, and the table in it."""

from __future__ import annotations

from .bootstrap import *
from .dialling import *
from .host import *
from .server_process import *
from .table import *
