"""Every setting of the agent: what it means, where it may come from, and what is in force.

``load_settings`` is the way in; ``Settings`` is what comes out. Nothing here imports more than the standard
library.
"""

from __future__ import annotations

from elastic_agent.config.builder import Note
from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import Resolved, load_settings
from elastic_agent.config.settings import Settings
from elastic_agent.config.sources.base import Layer, Source
from elastic_agent.config.values import NodeRange, StreamChoice
from elastic_agent.values import Endpoint, PortRange

__all__ = [
    "Endpoint",
    "Layer",
    "NodeRange",
    "Note",
    "PortRange",
    "Resolved",
    "Settings",
    "Source",
    "StreamChoice",
    "UsageError",
    "load_settings",
]
