"""Where settings come from: a module for each source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Layer(IntEnum):
    """The layers that a setting may come from; the smallest one that gives a value wins."""

    FLAG = 0
    ENVIRONMENT = 1
    FILE = 2
    SITE = 3
    DEFAULT = 4


@dataclass(frozen=True, slots=True)
class Source:
    """One source; ``name`` is what to look for: ``--nnodes``, ``PET_NNODES``, ``run.toml: nnodes``."""

    layer: Layer
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given, not yet parsed."""

    text: str
    source: Source
