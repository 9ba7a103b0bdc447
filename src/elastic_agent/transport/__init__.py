# ruff: noqa: F403 (each module's public names are the package's)
"""Access to a store: the records of a run, and the two kinds of stores below them.

The only code that accesses a store. Each store is a package of its own (:mod:`.c10d`, :mod:`.etcd`), which is not
imported from here: each loads a large library.
"""

from __future__ import annotations

from .addresses import *
from .base import *
from .blocking_call import *
from .certificates import *
from .coordinator_records import *
from .keys import *
from .peers import *
from .record_reader import *
from .records import *
