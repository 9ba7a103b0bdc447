"""How functions and their results become bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any


def pickler() -> tuple[Callable[[Any], bytes], bool]:
    """A function that pickles, and whether it pickles functions of the main module by value, as cloudpickle does."""
    try:
        return import_module("cloudpickle").dumps, True
    except ImportError:
        return pickle.dumps, False
