"""The c10d store: torch's TCPStore, its server in one agent's process, and the table in it."""

from __future__ import annotations

from .bootstrap import BootstrapStore, PortPicker
from .connection import agree_run_id, dial, dial_reports, open_table, release_run_id
from .dialling import LOOK_UP_S, check_store
from .host import C10dHost, find_or_host
from .inbox import C10dInbox
from .server_process import ServeStore, StoreServers, serve_here
from .table import C10dTable

__all__ = [
    "LOOK_UP_S",
    "BootstrapStore",
    "C10dHost",
    "C10dInbox",
    "C10dTable",
    "PortPicker",
    "ServeStore",
    "StoreServers",
    "agree_run_id",
    "check_store",
    "dial",
    "dial_reports",
    "find_or_host",
    "open_table",
    "release_run_id",
    "serve_here",
]
