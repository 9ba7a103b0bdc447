"""Access to a store: the records of a run, and the two kinds of stores below them.

The only code that accesses a store. Each store is a package of its own (:mod:`.c10d`, :mod:`.etcd`), which is not
imported from here: each loads a large library.
"""

from __future__ import annotations

from .addresses import connect as connect
from .addresses import interface_of as interface_of
from .addresses import is_local as is_local
from .addresses import is_loopback_name as is_loopback_name
from .addresses import own_addresses as own_addresses
from .addresses import own_network_problem as own_network_problem
from .addresses import resolve as resolve
from .addresses import source_towards as source_towards
from .base import NotAStoreError as NotAStoreError
from .base import Obstacle as Obstacle
from .base import OtherVersionError as OtherVersionError
from .base import RunView as RunView
from .base import Snapshot as Snapshot
from .base import StoreLostError as StoreLostError
from .base import Table as Table
from .base import TransportError as TransportError
from .base import UnreachableError as UnreachableError
from .base import WrongKeyError as WrongKeyError
from .base import how_to_reach as how_to_reach
from .blocking_call import DiskThread as DiskThread
from .blocking_call import run_abandonable as run_abandonable
from .certificates import Pem as Pem
from .certificates import Secret as Secret
from .coordinator_records import CoordinatorRecords as CoordinatorRecords
from .coordinator_records import ReportRecords as ReportRecords
from .keys import LifeKeys as LifeKeys
from .keys import RunKeys as RunKeys
from .peers import check_peers_are_told as check_peers_are_told
from .peers import peer_uid as peer_uid
from .record_reader import UnknownPlanError as UnknownPlanError
from .records import NodeRecords as NodeRecords
from .records import begun_life_of as begun_life_of
from .records import begun_runs as begun_runs
from .records import life_of as life_of
