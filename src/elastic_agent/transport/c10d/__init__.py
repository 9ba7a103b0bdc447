"""The c10d store: torch's TCPStore, its server in one agent's process, and the table in it."""

from __future__ import annotations

from .bootstrap import BootstrapStore as BootstrapStore
from .bootstrap import PortPicker as PortPicker
from .dialling import LOOK_UP_S as LOOK_UP_S
from .dialling import agree_run_id as agree_run_id
from .dialling import check_store as check_store
from .dialling import dial as dial
from .dialling import dial_reports as dial_reports
from .dialling import open_table as open_table
from .dialling import reach as reach
from .dialling import release_run_id as release_run_id
from .host import C10dHost as C10dHost
from .host import C10dInbox as C10dInbox
from .host import find_or_host as find_or_host
from .server_process import ServeStore as ServeStore
from .server_process import StoreServers as StoreServers
from .server_process import serve_here as serve_here
from .table import C10dTable as C10dTable
