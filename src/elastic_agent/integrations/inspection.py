"""What an integration has to know of the framework that is installed: its version, and the source of private names."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Versions:
    """A range of versions by their first two numbers: from ``first``, below ``limit``."""

    first: tuple[int, int]
    limit: tuple[int, int]

    def __contains__(self, version: str) -> bool:
        return self.first <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < self.limit

    def __str__(self) -> str:
        first, limit = (".".join(map(str, bound)) for bound in (self.first, self.limit))
        return f"at least {first} and below {limit}"


def loaded(roots: tuple[str, ...]) -> Iterator[str]:
    """Those of these packages that are imported completely."""
    for root in roots:
        package = sys.modules.get(root)
        if package is not None and hasattr(package, "__version__"):
            yield root


def source_of(module: str, path: str) -> str:
    """The source of an attribute, before it was wrapped; empty if there is none.

    Args:
        module: the module's name.
        path: the attribute's name in it, such as ``Trainer.fit``.
    """
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return inspect.getsource(inspect.unwrap(found))
    except (ImportError, AttributeError, OSError, TypeError):
        return ""
