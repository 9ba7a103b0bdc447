# ruff: noqa: F403 (each module's public names are the package's)
"""etcd: its keys as a table, and how the agents of a run elect their coordinator."""

from __future__ import annotations

from .client import *
from .leadership import *
from .table import *
