"""Which records of a c10d store are authenticated."""

from __future__ import annotations

import re

from elastic_agent.transport.sealed_records import RecordKinds, RunSeal, SealedRecords

from .keys import ROOT
from .store import StoreClient

KINDS = RecordKinds(
    of_run=re.compile(rf"{ROOT}/r/[^/]+/(?:(?:m|l|plan|report)/[^/]+|status)"),
    without_epoch=re.compile(rf"{ROOT}/(?:hello|welcome)/[^/]+"),
    member=re.compile(rf"{ROOT}/r/[^/]+/m/[^/]+"),
    lease=re.compile(rf"{ROOT}/r/[^/]+/l/[^/]+"),
)


def sealed(client: StoreClient, seals: RunSeal) -> StoreClient:
    """The same connection, with sealed records."""
    return client.storing(SealedRecords(seals, KINDS))
