"""The c10d store: torch's TCPStore, its server in one agent's process, and the links to it."""

from __future__ import annotations

from .bootstrap import BootstrapStore, PortPicker, dial_bootstrap
from .connection import agree_run_id, open_store, release_run_id
from .coordinator_link import C10dCoordinatorLink, C10dInbox
from .exchange import C10dExchangeLink, dial_exchange
from .host import C10dHost, find_or_host
from .link import C10dLink, dial
from .report_link import C10dReportLink, dial_reports
from .server_process import ServeStore, StoreServers, serve_here
from .store import CALL_TIMEOUT_S, StoreClient

__all__ = [
    "CALL_TIMEOUT_S",
    "BootstrapStore",
    "C10dCoordinatorLink",
    "C10dExchangeLink",
    "C10dHost",
    "C10dInbox",
    "C10dLink",
    "C10dReportLink",
    "PortPicker",
    "ServeStore",
    "StoreClient",
    "StoreServers",
    "agree_run_id",
    "dial",
    "dial_bootstrap",
    "dial_exchange",
    "dial_reports",
    "find_or_host",
    "open_store",
    "release_run_id",
    "serve_here",
]
