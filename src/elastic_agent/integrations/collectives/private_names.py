"""Every private name of torch that the integration uses; what a version of torch lacks is left out of the answers."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlparse

from elastic_agent.worker_variables import STORE_PORT

HOOK = "_check_valid_timeout"
"""A function that `init_process_group` and `new_group` call before they connect. It calls nothing that could fail, so
that a replacement is in no traceback."""

_HOOK_ID = -1
"""Of the hook after optimizer steps; ``register_optimizer_step_post_hook`` would take a number that a script's hook
would have without it."""

_RECENT = 16
"""The number of the last collectives of a group that are described."""

_BYTES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat", "UInt64"), 8),
    **dict.fromkeys(("Float", "Int", "ComplexHalf", "UInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16"), 2),
    "ComplexDouble": 16,
}
"""Of an element by the name of its type; 1 for others."""


def call_before_groups(begin: Callable[[str], None]) -> None:
    """Have `begin` called whenever the script is about to make a process group.

    It is given the file over which the ranks meet (``init_method="file://…"``, `FileStore`); empty: over none.
    """
    from torch.distributed import distributed_c10d as module

    original: Callable[[Any], None] = getattr(module, HOOK)

    def checked(timeout: Any) -> None:
        path = ""
        with contextlib.suppress(Exception):  # of the script's arguments, which torch checks
            path = _meeting_file(sys._getframe(1).f_locals)
        counted.calls += 1
        begin(path)
        original(timeout)

    counted: Any = checked
    counted.calls = 0  # which elastic_agent.survive reads
    setattr(module, HOOK, checked)


def _meeting_file(arguments: Mapping[str, Any]) -> str:
    bindings: Any = import_module("torch._C._distributed_c10d")
    store, url = arguments.get("store"), arguments.get("init_method")
    while isinstance(store, bindings.PrefixStore):
        store = store.underlying_store
    path = ""
    if isinstance(store, bindings.FileStore):
        path = store.path
    elif store is None and isinstance(url, str) and url.startswith("file:"):
        path = urlparse(url).path
    return os.path.abspath(path) if path else ""


def watch_optimizer_steps(begin: Callable[[object], None], end: Callable[[object], None]) -> None:
    """Have `begin` and `end` called with the optimizer before and after each step that is not compiled."""
    import torch

    names = sys.modules["torch.optim.optimizer"].__dict__

    def before_step(optimizer: object, *_: object) -> None:
        # First: a compiled step must depend on nothing that changes.
        if not torch.compiler.is_compiling():
            begin(optimizer)

    def after_step(optimizer: object, *_: object) -> None:
        if not torch.compiler.is_compiling():
            end(optimizer)

    names["_global_optimizer_pre_hooks"][_HOOK_ID] = before_step
    names["_global_optimizer_post_hooks"][_HOOK_ID] = after_step


def limit_agent_store() -> None:
    """Have PyTorch use the agents' store at its own port only, so that scripts can host stores of their own at others.

    With ``TORCHELASTIC_USE_AGENT_STORE``, torch 2.13 makes each rank a client of whatever address the script gives, for
    example as ``init_method="tcp://..."``: nobody hosts that store, and all wait for it. Later versions compare the
    address with ``MASTER_ADDR`` and ``MASTER_PORT``, which children of ``mp.spawn`` usually set to their own store.
    """
    module: Any = import_module("torch.distributed.rendezvous")
    original: Callable[[], bool] = module._torchelastic_use_agent_store

    def use_agent_store() -> bool:
        # The caller's argument: a replacement of the caller would be in the traceback of a rendezvous that fails.
        port = sys._getframe(1).f_locals.get("port")
        return original() and (port is None or str(port) == os.environ.get(STORE_PORT, str(port)))

    module._torchelastic_use_agent_store = use_agent_store


class Recorders:
    """PyTorch's flight recorders of this process, of gloo and of NCCL."""

    def __init__(self) -> None:
        from torch._C import _distributed_c10d as bindings

        self._summaries = [
            (backend, found)
            for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json"))
            if (found := getattr(bindings, name, None)) is not None
        ]
        self._traces = {
            backend: found
            for backend, name in (("gloo", "_dump_fr_trace"), ("nccl", "_dump_nccl_trace"))
            if (found := getattr(bindings, name, None)) is not None
        }
        self._names: dict[tuple[str, str], str] = {}
        """The names of the groups on all ranks, by backend and their number in this process."""
        self._completed: dict[str, int] = {}
        """By group, up to which collective all were found to be completed when it was last looked at each."""

    def summary(self) -> list[dict[str, Any]]:
        """Return how far each group is: ``group``, ``enqueued``, ``started``, ``completed``; takes about 0.1 ms."""
        status = self._status()
        if any(
            key not in self._names and int(counts["last_enqueued_collective"]) > 0
            for key, counts in status.items()
        ):
            for backend in self._traces:
                self._entries(backend)
        groups = []
        for key, counts in status.items():
            group = self._names.get(key, f"{key[0]} {key[1]}")
            groups.append(
                {
                    "group": group,
                    "enqueued": int(counts["last_enqueued_collective"]),
                    "started": int(counts["last_started_collective"]),
                    "completed": max(
                        int(counts["last_completed_collective"]), self._completed.get(group, -1)
                    ),
                }
            )
        return groups

    def details(self) -> list[dict[str, Any]]:
        """Return the same, with ``recent`` collectives, ``ranks`` of subgroups and ``timeout_s``; some milliseconds."""
        groups = {group["group"]: group for group in self.summary()}
        for backend in self._traces:
            for entry in self._entries(backend):
                group = groups.get(str(entry["process_group"][0]))
                if group is not None and not entry.get("is_p2p"):
                    # gloo completes collectives in several threads, and the last thread to say so wins.
                    if entry.get("retired") and entry["collective_seq_id"] == max(group["completed"], 0) + 1:
                        group["completed"] = self._completed[group["group"]] = entry["collective_seq_id"]
                    recent = group.setdefault("recent", [])
                    recent.append(_described(entry))
                    del recent[:-_RECENT]
                    group["timeout_s"] = entry.get("timeout_ms", 0) / 1000
        for name, ranks in _subgroups():
            if name in groups:
                groups[name]["ranks"] = ranks
        return list(groups.values())

    def _status(self) -> dict[tuple[str, str], dict[str, Any]]:
        found = {}
        for backend, dump in self._summaries:
            for number, counts in json.loads(dump(False, False)).get("pg_status", {}).items():
                found[backend, str(number)] = counts
        return found

    def _entries(self, backend: str) -> list[dict[str, Any]]:
        # Without stacks: the first time, finding the lines to them takes torch seconds.
        entries: list[dict[str, Any]] = pickle.loads(self._traces[backend](True, False, False)).get(
            "entries", []
        )
        for entry in entries:
            self._names[backend, str(entry["pg_id"])] = str(entry["process_group"][0])
        return sorted(entries, key=lambda entry: int(entry["record_id"]))


def _described(entry: dict[str, Any]) -> dict[str, Any]:
    size = 0
    for shape, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False):
        elements = 1
        for length in shape:
            elements *= length
        size += elements * _BYTES.get(kind, 1)
    return {
        "serial": entry["collective_seq_id"],
        "name": str(entry["profiling_name"]).rpartition(":")[2],
        "size_bytes": size,
    }


def _subgroups() -> Iterator[tuple[str, list[int]]]:
    """Yield the groups that do not have all ranks, by name, with their global ranks."""
    from torch.distributed import distributed_c10d as module

    world: Any = module._world
    ranks_of, names = dict(world.pg_group_ranks), dict(world.pg_names)
    most = max(map(len, ranks_of.values()), default=0)
    for group, ranks in ranks_of.items():
        if len(ranks) < most and group in names:
            yield str(names[group]), sorted(ranks)
