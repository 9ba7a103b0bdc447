"""The house plan: imports run downwards only, and the ground floor is pure."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import elastic_agent

PACKAGE = Path(elastic_agent.__file__).parent
NAME = "elastic_agent"

FLOORS = [
    {"cli"},
    {"doctor"},
    {"agent", "launcher", "testing", "torchrun"},
    {"web"},
    {"workers", "rendezvous"},
    {"integrations", "monitoring"},
    {"transport", "config", "data", "diagnosis", "survive"},
    {"protocol", "client", "logs"},
    {"exit_codes", "exit_note", "launch_outcome", "sd_notify", "store_servers", "values"},
    {"files", "linux", "name_lookups", "printable", "python_source", "worker_variables"},
]
"""A room may import itself and those on lower floors; rooms on one floor know nothing of each other."""

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

BESIDE = {"__main__": "cli"}
"""Modules beside the rooms, and the room they belong to."""

READ_SETTINGS = {"cli", "doctor", "agent", "launcher", "torchrun/plugin.py"}
"""Where settings are known: the command, doctor, the agent, and torchrun's way in, which reads torchrun's options."""

FRONT_DOORS = {"protocol", "transport", "transport/c10d", "transport/etcd"}
"""Packages whose names other packages import from the package itself, not from its modules."""

GUARD = {
    "workers/guard/__main__.py",
    *(
        f"workers/guard/{part}.py"
        for part in ("cold", "generation", "kept_output", "kept_workers", "line", "progress", "relay", "warm")
    ),
    "linux.py",
    "worker_variables.py",
}
"""What the guard process is made of: it must start at once, and survive whatever torch does."""

IMPURE = {
    "asyncio",
    "multiprocessing",
    "random",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
}
"""What the protocol must not know: torch, sockets, threads, clocks, chance."""

TORCHS_PRIVATE = {
    "store_servers.py",
    "workers/context.py",
    "integrations/collectives/private_names.py",
}
"""The places for torch's private Python names, of the agent and of workers; a test says when a new torch lacks one."""

TORCHS_BINDINGS = {"torch._C._distributed_c10d"}
"""Where torch's type hints have the classes that ``torch.distributed`` publishes (TCPStore, PrefixStore)."""

OTHER_ROOMS_PRIVATE = {"elastic_agent.client._cells"}
"""The heartbeat cells: written by the client, read by the agent, and no business of the client's users."""


@dataclass(frozen=True)
class Import:
    """One imported module, and whether only type checkers see it."""

    module: str
    line: int
    for_types_only: bool


@cache
def imports(file: Path) -> tuple[Import, ...]:
    """Full names of the modules (and of what is taken out of them) that ``file`` imports, anywhere in it."""
    tree = ast.parse(file.read_text())
    return tuple(_imports(tree, [NAME, *file.parent.relative_to(PACKAGE).parts], False))


def _imports(node: ast.AST, package: list[str], for_types_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
            yield from (Import(name, child.lineno, for_types_only) for name in names)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) + 1 - child.level] if child.level else []
            start = ".".join([*base, *([child.module] if child.module else [])])
            names = [f"{start}.{alias.name}" for alias in child.names]
            yield from (Import(name, child.lineno, for_types_only) for name in names)
        else:
            checking = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            yield from _imports(child, package, for_types_only or checking)


def files(rooms: Collection[str]) -> list[Path]:
    found = [file for room in rooms for file in (PACKAGE / room).rglob("*.py")]
    return found + [PACKAGE / f"{room}.py" for room in rooms if (PACKAGE / f"{room}.py").is_file()]


def rooms() -> list[str]:
    return sorted(
        entry.stem
        for entry in PACKAGE.iterdir()
        if entry.stem != "__init__" and (entry.suffix == ".py" or (entry / "__init__.py").is_file())
    )


def place(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def complaints(checked: list[Path], wrong: Callable[[Path, Import], bool]) -> list[str]:
    """A line for each import that ``wrong(file, import)`` finds wrong."""
    assert checked
    return [
        f"{place(file)}:{imported.line} imports {imported.module}"
        for file in checked
        for imported in imports(file)
        if wrong(file, imported)
    ]


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == NAME and len(parts) > 1 and parts[1] in FLOOR_OF else None


@pytest.mark.parametrize("room", rooms())
def test_imports_run_downwards(room: str) -> None:
    floor = FLOOR_OF.get(BESIDE.get(room, room))
    assert floor is not None, f"give {room} its place in FLOORS"

    def upwards(file: Path, imported: Import) -> bool:
        other = room_of(imported.module)
        same_house = other in (None, BESIDE.get(room, room))
        return not same_house and FLOOR_OF[str(other)] <= floor

    assert complaints(files({room}), upwards) == []


def test_every_package_has_a_layer_and_every_layer_exists() -> None:
    assert {*rooms()} - BESIDE.keys() == FLOOR_OF.keys()


def test_only_upper_layers_read_settings() -> None:
    """What a lower room needs of them it is given, so that it can be used without them."""

    def reads(file: Path, imported: Import) -> bool:
        allowed = place(file) in READ_SETTINGS or place(file).split("/")[0] in READ_SETTINGS
        return room_of(imported.module) == "config" and not allowed

    assert complaints(files({*FLOOR_OF} - {"config"}), reads) == []


def test_the_protocol_is_pure() -> None:
    assert complaints(files({"protocol"}), lambda _, imported: imported.module.split(".")[0] in IMPURE) == []


def test_the_guard_needs_the_standard_library_only() -> None:
    guard = [PACKAGE / name for name in GUARD]

    def foreign(_: Path, imported: Import) -> bool:
        top = imported.module.split(".")[0]
        if top != NAME or imported.for_types_only:
            return top not in {*sys.stdlib_module_names, NAME}
        parts = imported.module.split(".")
        return not any(
            f"{'/'.join(parts[1:length])}.py" in GUARD for length in range(2, len(parts) + 1)
        ) and parts[-1] not in {Path(name).stem for name in GUARD}

    assert complaints(guard, foreign) == []


def test_private_names_of_torch_are_used_in_three_modules() -> None:
    def private(file: Path, imported: Import) -> bool:
        parts = imported.module.split(".")
        known = any(imported.module.startswith(binding) for binding in TORCHS_BINDINGS)
        hidden = parts[0] == "torch" and any(part.startswith("_") for part in parts[1:])
        return hidden and not known and place(file) not in TORCHS_PRIVATE

    assert complaints(files(FLOOR_OF.keys()), private) == []


def test_the_substitute_for_torch_distributed_is_the_same_object() -> None:
    import torch.distributed
    from torch._C import _distributed_c10d as bindings

    assert bindings.TCPStore is torch.distributed.TCPStore
    assert bindings.PrefixStore is torch.distributed.PrefixStore


def test_private_modules_are_used_in_their_own_package_only() -> None:
    def pries(file: Path, imported: Import) -> bool:
        other = room_of(imported.module)
        if other is None or other == place(file).split("/")[0]:
            return False
        known = any(imported.module.startswith(module) for module in OTHER_ROOMS_PRIVATE)
        hidden = any(
            part.startswith("_") and not part.startswith("__") for part in imported.module.split(".")
        )
        return hidden and not known

    assert complaints(files(FLOOR_OF.keys()), pries) == []


def test_names_of_protocol_and_transport_are_imported_from_the_package() -> None:
    def deeper(file: Path, imported: Import) -> bool:
        parts = imported.module.split(".")[1:]
        doors = [door for door in FRONT_DOORS if parts[: door.count("/") + 1] == door.split("/")]
        if room_of(imported.module) == place(file).split("/")[0] or not doors:
            return False
        package = PACKAGE / max(doors, key=len)
        rest = parts[max(doors, key=len).count("/") + 1 :]
        return len(rest) > 1 and (package / f"{rest[0]}.py").is_file()

    assert complaints(files(FLOOR_OF.keys()), deeper) == []


def test_names_of_worker_variables_are_spelled_in_one_module() -> None:
    """Those of settings follow from the settings' names. Texts for users may mention both."""
    own = PACKAGE / "worker_variables.py"
    spelled = [
        f"{place(file)}:{node.lineno} {node.value}"
        for file in PACKAGE.rglob("*.py")
        if file != own and "ELASTIC_AGENT_" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and re.match(r"ELASTIC_AGENT_\w*$", str(node.value))
    ]
    assert spelled == []
