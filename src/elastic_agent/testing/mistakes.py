"""Judges a run with faults: checks of what users care about, and classic mistakes of training scripts with remedies."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.testing.cluster import LocalCluster
from elastic_agent.testing.course import Course
from elastic_agent.testing.processes import Line

LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every machine has of its own."""
LARGE_BYTES = 1 << 30
"""Of larger files, only the directory at the end is read."""


@dataclass(frozen=True)
class Check:
    """One check, and what was found."""

    passed: bool | None
    """None: there was nothing to examine."""
    text: str

    def __str__(self) -> str:
        result = {True: "ok", False: "FAILED", None: "not examined"}[self.passed]
        return f"{result}: {self.text}"


@dataclass(frozen=True)
class Mistake:
    """One mistake: its ``name``, what was seen, and what to do."""

    name: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}\n  remedy: {self.remedy}"


@dataclass(frozen=True)
class Evidence:
    """The records of a run with faults, from which mistakes are recognised."""

    records: Sequence[Line]
    course: Course
    local: Sequence[Path]
    """Folders that exist on one node only, besides ``LOCAL_FOLDERS``."""
    shared: Sequence[Path]
    """Folders that all nodes share."""
    torn: Sequence[str] = ()
    """Files that could not be read when a fault hit."""

    def saves(self) -> list[Line]:
        """Return saves that were made during training, finished or not: checkpoints, not data that a script caches."""
        trains: set[int] = set()
        found = []
        for line in self.records:
            if line["kind"] in ("step", "beat"):
                trains.add(line["pid"])
            elif line["kind"] == "saving" and line["pid"] in trains:
                found.append(line)
        return found

    def files(self) -> list[Line]:
        """Return those saves that go into files; Lightning saves into memory, and writes that into a file."""
        return [line for line in self.saves() if line["path"]]

    def loads(self) -> list[Line]:
        """Return files that were read after the first generation, or could not be."""
        first = min((line["generation"] for line in self.records), default=0)
        return [line for line in self.records if line["kind"] == "load" and line["generation"] > first]


# -- checks ---------------------------------------------------------------------------------------


def check_leftovers(cluster: LocalCluster) -> Check:
    """Check that no processes, heartbeat files or shared memory of workers were left behind."""
    found = [f"process {pid}" for pid in cluster.wait_gone(cluster.marked_processes())]
    born = cluster.records("born")
    beats = {str(line["heartbeat_file"]) for line in born if line["heartbeat_file"]}
    found += [path for path in sorted(beats) if os.path.exists(path)]
    prefixes = tuple(f"torch_{line['pid']}_" for line in born)
    found += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(prefixes)]
    return Check(not found, f"left behind: {', '.join(found) or 'nothing'}")


def is_torn(path: Path) -> bool:
    """Return whether it exists and cannot be read as torch.load would: cut off, empty, or with wrong check sums."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(2)
        if begin != b"PK":  # torch's format before 1.6, or not torch's: only an empty one is certainly wrong
            return size == 0
        with zipfile.ZipFile(path) as archive:
            return size <= LARGE_BYTES and archive.testzip() is not None
    except FileNotFoundError:  # replaced or removed meanwhile
        return False
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError):
        return True


# -- mistakes -------------------------------------------------------------------------------------


def find_mistakes(seen: Evidence) -> list[Mistake]:
    """Return all mistakes that the run shows, the causes before what follows from them."""
    return [*_node_local(seen), *_rank_named(seen), *_not_atomic(seen)] or [*_no_resume(seen)]


def _node_local(seen: Evidence) -> Iterator[Mistake]:
    saved = [line["path"] for line in seen.files() if _is_local(line["path"], seen)]
    read = any(_is_local(line["path"], seen) for line in seen.loads())
    if saved and (read or any(generation.from_scratch for generation in seen.course.generations.values())):
        yield Mistake(
            "checkpoint in a node-local folder",
            f"the script saves {saved[-1]}, which exists on one node only: after the loss of that node, or when its "
            "ranks change, training continues without it",
            "save to storage that all nodes share (with chaos: below the working folder, or {checkpoints}), and load "
            "from there on all nodes",
        )


def _is_local(path: str, seen: Evidence) -> bool:
    def within(folders: Iterable[str | os.PathLike[str]]) -> int:
        """Return the length of the longest of the folders that the path is in."""
        return max((len(str(folder)) for folder in folders if Path(path).is_relative_to(folder)), default=0)

    return within([*LOCAL_FOLDERS, *seen.local]) > within(seen.shared)


def _rank_named(seen: Evidence) -> Iterator[Mistake]:
    by_generation: dict[int, dict[int, set[str]]] = {}
    for line in seen.files():
        by_generation.setdefault(line["generation"], {}).setdefault(line["rank"], set()).add(line["path"])
    for by_rank in by_generation.values():
        shapes = [{_shape(path, rank): path for path in paths} for rank, paths in by_rank.items()]
        common = {*shapes[0]}.intersection(*shapes[1:]) - {None} if len(shapes) > 1 else set()
        if common:
            paths = [shape[next(iter(common))] for shape in shapes[:2]]
            rank, other_rank, *_ = by_rank
            yield Mistake(
                "checkpoint named after a rank",
                f"rank {rank} saves {paths[0]}, rank {other_rank} saves {paths[1]}: ranks change between "
                "restarts, so that a worker loads the file of another one, or finds none in a larger world",
                "have rank 0 save one checkpoint named after the run (client.current().run_id), and load it on all "
                "ranks; save sharded states with torch.distributed.checkpoint, which can be loaded in another world",
            )
            return


def _shape(path: str, rank: int) -> str | None:
    """Return the path with the rank left out; None if it does not contain it."""
    folder, name = os.path.split(path)
    replaced = re.sub(rf"(?<!\d)0*{rank}(?!\d)", "*", name)
    return os.path.join(folder, replaced) if replaced != name else None


def _not_atomic(seen: Evidence) -> Iterator[Mistake]:
    written = [line["path"] for line in seen.files()]
    loaded = {line["path"] for line in seen.loads()}
    failed = {line["path"]: line["error"] for line in seen.loads() if line["error"]}
    for path in dict.fromkeys(written):
        replaced = path in seen.torn or written.count(path) > 1
        if path in failed or (path in loaded and replaced):
            torn = f"; it could not be read afterwards ({failed[path]})" if path in failed else ""
            yield Mistake(
                "checkpoint is not replaced atomically",
                f"the script writes {path} in place and loads it after a restart{torn}; a "
                "worker that is killed while it saves leaves half of the only checkpoint",
                'save to another name in the same folder, then rename: torch.save(state, path + ".new"); '
                'os.replace(path + ".new", path)',
            )
            return


def _no_resume(seen: Evidence) -> Iterator[Mistake]:
    saves = seen.saves()
    for generation in seen.course.generations.values():
        earlier = [line for line in saves if line["generation"] < generation.number]
        if generation.from_scratch and (earlier or not saves):
            paths = [line["path"] for line in earlier if line["path"]]
            had = (
                f"although it had saved {paths[-1] if paths else 'a checkpoint'}"
                if earlier
                else "and it saves no checkpoint that could be seen"
            )
            read = " (the script loaded a file, but did not use its content)" if generation.loaded else ""
            yield Mistake(
                "no resume",
                f"in generation {generation.number} training began at step 0 again, after {generation.lost} steps, "
                f"{had}{read}",
                "save model, optimizer and step regularly, and load the latest checkpoint, if there is one, whenever "
                "the script starts",
            )
            return
