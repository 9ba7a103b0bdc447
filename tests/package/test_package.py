"""What holds for the package as a whole: who may import whom, what an import costs, what is installed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import elastic_agent
from elastic_agent.exit_codes import ExitCode

PACKAGE = Path(elastic_agent.__file__).parent
# A room may import those below it and itself; rooms on one line know nothing of each other.
FLOORS = [
    {"cli"},
    {"agent"},
    {"workers", "rendezvous"},
    {"transport"},
    {"protocol", "client", "config", "logs"},
    {"exit_codes"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The ground floor is pure: it knows nothing of torch, sockets, threads or clocks.
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


def imports(file: Path) -> Iterator[str]:
    """Full names of what `file` imports, anywhere in it."""
    package = ["elastic_agent", *file.parent.relative_to(PACKAGE).parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def rooms() -> list[str]:
    return sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file())


def upward(room: str, module: str) -> bool:
    parts = module.split(".")
    if parts[0] != "elastic_agent" or len(parts) < 2 or parts[1] == room or parts[1] not in FLOOR_OF:
        return False
    return FLOOR_OF[parts[1]] <= FLOOR_OF[room]


@pytest.mark.parametrize("room", rooms())
def test_imports_run_downwards(room: str) -> None:
    assert room in FLOOR_OF, f"give {room}/ its place in FLOORS"
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {module}"
        for file in (PACKAGE / room).rglob("*.py")
        for module in imports(file)
        if upward(room, module)
    ]
    assert wrong == []


def test_the_protocol_is_pure() -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {module}"
        for file in (PACKAGE / "protocol").rglob("*.py")
        for module in imports(file)
        if module.split(".")[0] in IMPURE
    ]
    assert wrong == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import sys; before = set(sys.modules); import elastic_agent; print(*set(sys.modules) - before)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    assert loaded.stdout.split() == ["elastic_agent"]


def test_the_command_and_the_plug_in_for_torchrun_are_installed() -> None:
    command = next(iter(entry_points(group="console_scripts", name="elastic-agent")))
    assert callable(command.load())
    # torch calls what it loads, and takes the result for the function that creates handlers.
    plugin = next(iter(entry_points(group="torchrun.handlers", name="elastic")))
    assert callable(plugin.load()())


def test_the_installed_version_is_the_packages_own() -> None:
    assert version("elastic-agent") == elastic_agent.__version__


def test_the_readme_lists_every_exit_code() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("## Exit codes")[2].partition("\n## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)] == [
        int(code) for code in ExitCode
    ]
