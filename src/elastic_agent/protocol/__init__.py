# ruff: noqa: F403 (each module's public names are the package's)
"""The protocol as pure code: records, decisions, ranks. No torch, no threads, no clock.

Other packages import its names from here.
"""

from __future__ import annotations

from .activity import *
from .budget import *
from .cluster_view import *
from .codec import *
from .coordinator import *
from .leases import *
from .node import *
from .notices import *
from .records import *
