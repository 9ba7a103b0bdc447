"""Deliberate bugs that random seeds detect: most of them only show when another client forges records."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from elastic_agent.protocol import (
    leases,
    records,
)
from elastic_agent.rendezvous.backends.etcd.election import Election
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport import sealed_records, sealing
from elastic_agent.transport.c10d import plans, sealed
from elastic_agent.transport.etcd import leadership, link
from elastic_agent.transport.etcd.sealed import RunSecret

from . import keyed
from .mutants import Mutant, Patch, always


@dataclass(frozen=True)
class SeededMutant(Mutant):
    """One deliberate bug, with the universes that show it."""

    focus: tuple[str, ...] = ()
    """The faults that it takes to see it, if it takes luck otherwise."""
    hosting: str | None = None
    """Where the store lives, if that is not to be drawn."""
    forged: bool = False
    """Whether the run is authenticated, and another client writes into its store."""
    seeds: int = 400
    """Within how many seeds it must be detected."""
    first: int = 0
    """The first of these seeds: where luck takes many, one that has it by the present scenarios."""


def _last_call_is_written(right: Any) -> Any:
    def save_soon(self: RunHistoryStore, run_id: str, history: records.History) -> Future[None]:
        return self._disk.submit(f"save {run_id}", lambda: self._write(run_id, history))

    return save_soon


def _until_all_know(right: Any) -> Any:
    def winding_up(self: Election) -> bool:
        return self._driver is not None and self._driver.winding_up and not self._driver.over

    return property(winding_up)


def _without_path(right: Any) -> Any:
    return lambda key, path, number, record: right(key, "", number, record)


def _without_number(right: Any) -> Any:
    return lambda key, path, number, record: right(key, path, b"", record)


def _any_greeting(right: Any) -> Any:
    def tag(key: bytes, path: str, number: bytes, record: bytes) -> bytes:
        return right(key, "a greeting" if "/welcome/" in path else path, number, record)  # type: ignore[no-any-return]

    return tag


def _without_epoch(right: Any) -> Any:
    return lambda root, epoch: right(root, b"")


def _takes_the_record_as_it_is(right: Any) -> Any:
    return classmethod(
        lambda cls, raw, why: raw[keyed.HEAD_BYTES :] if raw.startswith(sealing.MAGIC) else raw
    )


def _remembers_no_number(right: Any) -> Any:
    def opened(self: sealed_records.SealedRecords, key: str, data: bytes) -> bytes:
        self._seals.newest.pop(key, None)
        return right(self, key, data)  # type: ignore[no-any-return]

    return opened


def _without(kind: str) -> Callable[[Any], Any]:
    return lambda right: replace(right, of_run=re.compile(right.of_run.pattern.replace(f"{kind}|", "", 1)))


def _without_revision(right: Any) -> Any:
    """What seals the epoch: the revision in which the life was written, and the life."""
    return lambda root, epoch: right(root, epoch.partition(b"/")[2] if b"/" in epoch else epoch)


def _without_in_etcd(kind: str) -> Callable[[Any], Any]:
    def changed(right: Any) -> Any:
        def init(self: RunSecret, secret: sealing.Secret, run_root: str) -> None:
            right(self, secret, run_root)
            self._kinds = _without(kind)(self._kinds)

        return init

    return changed


def _gives_up_a_removed_record(right: Any) -> Any:
    def replace_record(self: link.EtcdLink, name: str, data: bytes, known: int) -> None:
        if self._client.get(self._keys.member(name)) is not None:
            right(self, name, data, known)

    return replace_record


def _ignores_the_life(right: Any) -> Any:
    def init(self: leadership.Leadership, *args: Any) -> None:
        right(self, *args)
        self._life_is_ours = self._is_leader

    return init


def _names_the_store_by_its_life(right: Any) -> Any:
    def init(self: link.EtcdLink, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.store_id = self.store_id.rpartition(".")[0]

    return init


def _in_etcd(name: str, what: str, *patches: Patch, forgers: str = "", **more: Any) -> SeededMutant:
    """One that another client of etcd shows."""
    quirks = (f"forgers {forgers}",) if forgers else ()
    return SeededMutant(f"etcd-{name}", what, patches, quirks=quirks, hosting="etcd", forged=True, **more)


_ALL = (
    _in_etcd(
        "seal-without-path",
        "what authenticates a record in etcd does not cover its key",
        (sealing, "_tag", _without_path),
        forgers="move",
    ),
    _in_etcd(
        "seal-without-number",
        "what authenticates a record in etcd does not cover its number",
        (sealing, "_tag", _without_number),
        forgers="renumber",
    ),
    _in_etcd(
        "seal-without-epoch",
        "records of an earlier life of the run in etcd count",
        (sealing, "_epoch_key", _without_epoch),
        forgers="end life,replay",
    ),
    _in_etcd(
        "epoch-without-revision",
        "a life of the run in etcd that is written back is the earlier one",
        (sealing, "_epoch_key", _without_revision),
        forgers="end life,replay",
    ),
    _in_etcd(
        "accepts-unverified-records",
        "a record in etcd counts whether or not it is authenticated",
        (sealing.Unverified, "of", _takes_the_record_as_it_is),
    ),
    _in_etcd(
        "accepts-earlier-records",
        "a record in etcd counts although a newer one was there before",
        (sealed_records.SealedRecords, "opened", _remembers_no_number),
        forgers="replay",
    ),
    _in_etcd(
        "plans-not-authenticated",
        "plans in etcd are not authenticated",
        (RunSecret, "__init__", _without_in_etcd("plan")),
    ),
    _in_etcd(
        "members-not-authenticated",
        "member records in etcd are not authenticated",
        (RunSecret, "__init__", _without_in_etcd("m")),
    ),
    _in_etcd(
        "leases-not-authenticated",
        "leases in etcd are not authenticated",
        (RunSecret, "__init__", _without_in_etcd("l")),
    ),
    _in_etcd(
        "earlier-plans-are-unknown",
        "a coordinator in etcd goes on from the plan that it finds, and not from the newest that was there",
        (leadership.Leadership, "_read_earlier_plans", always(None)),
        forgers="withhold,depose",
    ),
    _in_etcd(
        "withheld-plans-stay-away",
        "the coordinator does not write the newest plan in etcd again when another client has removed it",
        (leadership.Leadership, "_keep", always(None)),
        forgers="withhold",
        first=10,
    ),
    _in_etcd(
        "removed-members-stay-away",
        "a node does not write its record in etcd again when another client has removed it",
        (link.EtcdLink, "_keep", always(None)),
        (link.EtcdLink, "_replace", _gives_up_a_removed_record),
        forgers="delete",
        first=115,
    ),
    _in_etcd(
        "leads-an-ended-life",
        "a coordinator goes on when another client has ended the life of the run in etcd",
        (leadership.Leadership, "__init__", _ignores_the_life),
        forgers="end life",
        first=5,
    ),
    _in_etcd(
        "names-the-store-by-its-life",
        "nodes take a life of the run in etcd that is written back for the earlier one",
        (link.EtcdLink, "__init__", _names_the_store_by_its_life),
        first=1075,
    ),
    SeededMutant(
        "seal-without-path",
        "what authenticates a record does not cover the key that it is stored under",
        ((sealing, "_tag", _without_path),),
        quirks=("forgers move",),
        forged=True,
    ),
    SeededMutant(
        "seal-without-number",
        "what authenticates a record does not cover its number",
        ((sealing, "_tag", _without_number),),
        quirks=("forgers renumber",),
        forged=True,
    ),
    SeededMutant(
        "seal-without-epoch",
        "records of an earlier life of the store count",
        ((sealing, "_epoch_key", _without_epoch),),
        focus=("store crash", "join"),
        quirks=("forgers replay",),
        forged=True,
    ),
    SeededMutant(
        "answers-to-any-greeting",
        "the answer to another greeting, in an earlier life of the store, is taken for the answer",
        ((sealing, "_tag", _any_greeting),),
        quirks=("forgers greet",),
        focus=("store crash", "join"),
        forged=True,
        first=12,
    ),
    SeededMutant(
        "accepts-unverified-records",
        "a record counts whether or not it is authenticated",
        ((sealing.Unverified, "of", _takes_the_record_as_it_is),),
        forged=True,
    ),
    SeededMutant(
        "accepts-earlier-records",
        "a record counts although a newer one was there before",
        ((sealed_records.SealedRecords, "opened", _remembers_no_number),),
        quirks=("forgers replay",),
        forged=True,
    ),
    SeededMutant(
        "revives-revoked-leases",
        "a lease that was revoked counts as it was before the revocation",
        ((sealed_records, "REVOKED", lambda right: 0),),
        quirks=("forgers replay",),
        forged=True,
    ),
    SeededMutant(
        "plans-not-authenticated",
        "plans are not authenticated",
        ((sealed, "KINDS", _without("plan")),),
        forged=True,
    ),
    SeededMutant(
        "members-not-authenticated",
        "member records are not authenticated",
        ((sealed, "KINDS", _without("m")),),
        forged=True,
    ),
    SeededMutant(
        "leases-not-authenticated",
        "leases are not authenticated",
        ((sealed, "KINDS", _without("l")),),
        forged=True,
    ),
    SeededMutant(
        "removed-leases-were-not-renewed",
        "a lease that another client has removed counts from the last renewal that the coordinator saw",
        (
            (
                leases.LeaseLedger,
                "revoked",
                lambda right: lambda self, incarnation, gone_s=None: right(self, incarnation),
            ),
        ),
        quirks=("forgers delete",),
        hosting="serve",
        first=440,
        forged=True,
    ),
    SeededMutant(
        "withheld-plans-stay-away",
        "the coordinator does not write the newest plan again when another client has removed it",
        ((plans.PlanWriter, "keep", always(None)),),
        quirks=("forgers withhold",),
        forged=True,
    ),
    SeededMutant(
        "last-call-is-written",
        "of the histories that wait for the disk the one that was handed in last is written, not the newest",
        ((RunHistoryStore, "save_soon", _last_call_is_written),),
        focus=("slow disk", "worker fails", "join"),
        hosting="etcd",
        first=340,
    ),
    SeededMutant(
        "leaves-before-the-end",
        "the coordinator leaves when every node knows the outcome, before the records are removed",
        ((Election, "winding_up", _until_all_know),),
        hosting="etcd",
        first=110,
    ),
)

MUTANTS = {mutant.name: mutant for mutant in _ALL}
