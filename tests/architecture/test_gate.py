"""Tests of `make test` depend neither on the speed of the machine nor on the date nor on names that others use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ONLY_PARSED = {"config", "diagnosis", "fuzz", "protocol"}
"""Folders whose tests start nothing: run ids and ports are text there."""

OWN_CLOCK = {"protocol", "simulator", "rendezvous/test_coordinator_driver.py", "rendezvous/test_election.py"}
"""Where time is a number that the test passes in; other modules import `tests.virtual_time` for that."""

CLOCK = re.compile(r"time\.(monotonic|perf_counter|process_time|thread_time)(_ns)?")
DATE = re.compile(r"time\.time|(datetime\.)?(datetime|date)\.(now|utcnow|today)")
SLEEP = re.compile(r"(time|asyncio)\.sleep|sleep")

COMPARES, SLEEPS, DATES = "compares a duration with a number", "sleeps", "reads the date"
RUN_ID, PORT = "has a fixed run id", "has a fixed port"


def is_proof(node: ast.AST) -> bool:
    """Return whether a function or class is marked `prove`, so that `make test` does not run it."""
    decorators = getattr(node, "decorator_list", ())
    return any(ast.unparse(decorator) in ("pytest.mark.prove", "prove") for decorator in decorators)


def complaints(source: str, place: str = "agent/test_story.py") -> list[str]:
    """Return the line of each place that does not comply, and why."""
    tree = ast.parse(source)
    statements = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    if any(text.startswith("pytestmark = ") and "mark.prove" in text for text in statements):
        return []
    folder = place.partition("/")[0]
    owns_clock = bool(OWN_CLOCK & {folder, place}) or "import virtual_time" in source
    found = {
        (line, reason)
        for line, reason in _visit(tree, False)
        if not (owns_clock and reason in (COMPARES, SLEEPS))
        and not (folder in ONLY_PARSED and reason in (RUN_ID, PORT))
    }
    return [f"{line}: {reason}" for line, reason in sorted(found)]


def _visit(node: ast.AST, is_in_test: bool) -> Iterator[tuple[int, str]]:
    for child in ast.iter_child_nodes(node):
        if is_proof(child):
            continue
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        inside = is_in_test or (is_function and child.name.startswith("test_"))
        if isinstance(child, ast.Assert) and _compares_duration(child):
            yield child.lineno, COMPARES
        elif isinstance(child, ast.Call):
            name = ast.unparse(child.func)
            if DATE.fullmatch(name):
                yield child.lineno, DATES
            elif inside and SLEEP.fullmatch(name) and ast.unparse(child.args[0]) != "0":
                yield child.lineno, SLEEPS
        yield from _fixed_names(child)
        yield from _visit(child, inside)


def _compares_duration(statement: ast.Assert) -> bool:
    return any(
        isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        and any(map(_is_duration, sides))
        and any(map(_is_limit, sides))
        for node in ast.walk(statement.test)
        if isinstance(node, ast.Compare)
        for operator, sides in zip(node.ops, pairwise([node.left, *node.comparators]), strict=True)
    )


def _is_duration(node: ast.expr) -> bool:
    match node:
        case ast.BinOp():
            return _is_duration(node.left) or _is_duration(node.right)
        case ast.Call():
            name = ast.unparse(node.func)
            return CLOCK.fullmatch(name) is not None or (
                name in ("abs", "max", "min", "sum") and any(map(_is_duration, node.args))
            )
        case ast.GeneratorExp():
            return _is_duration(node.elt)
        case ast.Subscript():
            return _is_duration(node.slice) or _is_duration(node.value)
        case ast.Name() | ast.Attribute() | ast.Constant():
            return ast.unparse(node).strip("'").endswith("_s")
    return False


def _is_limit(node: ast.expr) -> bool:
    """Return whether this is made of numbers and upper-case constants only, and is not 0."""
    text = re.sub(r"\b[a-z]\w*\.", "", ast.unparse(node))  # without names of modules
    return text not in ("0", "0.0") and re.fullmatch(r"[-+*/(). A-Z\d_e]+", text) is not None


def _fixed_names(node: ast.AST) -> Iterator[tuple[int, str]]:
    words = getattr(node, "args" if isinstance(node, ast.Call) else "elts", ())
    for option, value in pairwise(words if isinstance(words, list) else ()):
        if isinstance(option, ast.Constant) and isinstance(value, ast.Constant):
            if option.value == "--rdzv-id":
                yield value.lineno, RUN_ID
            if option.value in ("--master-port", "--rdzv-endpoint") and re.search(
                r"^((127\.0\.0\.1|localhost):)?\d{4,5}$", str(value.value)
            ):
                yield value.lineno, PORT
    match node:
        case ast.keyword(arg="port", value=ast.Constant(value=int(number))) if number >= 1024:
            yield node.value.lineno, PORT


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in TESTS.glob("*/test_*.py")}))
def test_tests_own_their_clock_and_their_names(folder: str) -> None:
    places = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.glob(f"{folder}/test_*.py"))
    found = [
        f"tests/{place}:{line}" for place in places for line in complaints((TESTS / place).read_text(), place)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("assert late_s < 1.0", COMPARES),
        ("assert 0.5 <= event['boottime_s'] - begun_s", COMPARES),
        ("assert time.monotonic() - begun > LEASE_S", COMPARES),
        ("assert event['boottime_s'] < other['boottime_s']", ""),
        ("assert stopped_s < killed_s", ""),
        ("assert pause_s == 2.0", ""),
        ("assert max(result.late_s for result in found) <= 1e-3", COMPARES),
        ("assert abs(first_s - second_s) < module.MARGIN_S", COMPARES),
        ("assert len(steps_s) > 2 * RENEWALS", ""),
        ("assert 0 < age_s", ""),
        ("time.sleep(0.1)", SLEEPS),
        ("await asyncio.sleep(LEASE_S)", SLEEPS),
        ("await asyncio.sleep(0)", ""),
        ("today = datetime.date.today()", DATES),
        ("now_s = time.time()", DATES),
        ("run('--rdzv-id', 'job')", RUN_ID),
        ("argv = ['--rdzv-id', unique('job')]", ""),
        ("argv = ['--rdzv-endpoint', 'localhost:29400']", PORT),
        ("start(port=29500)", PORT),
        ("start(port=0)", ""),
    ],
)
def test_a_test_that_does_not_comply_is_named(code: str, reason: str) -> None:
    marked = "\nasync def test_story():\n    "
    assert complaints(marked + code) == ([f"3: {reason}"] if reason else [])
    assert complaints(f"@pytest.mark.prove{marked}{code}") == []
    assert complaints(f"pytestmark = pytest.mark.prove{marked}{code}") == []
