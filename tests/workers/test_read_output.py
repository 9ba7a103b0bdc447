"""Reading workers' output from its files."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

from elastic_agent.workers.guard.kept_output import KeptOutput
from elastic_agent.workers.output.folders import LogFolders, run_folder
from elastic_agent.workers.output.read_output import read_output


def worker_files(folder: Path, generation: int, node_id: str = "n1") -> Path:
    """Make the folder of a node as an agent does; returns that of its worker."""
    made = LogFolders(str(folder), 20).make("cats", generation, node_id) / "0"
    made.mkdir()
    return made


def without_heads(output: dict[str, str]) -> dict[str, list[str]]:
    """Return the lines of each worker, but for those that say what was left out."""
    return {
        name: [line for line in text.splitlines() if not line.startswith("…")]
        for name, text in output.items()
    }


def test_the_last_lines_come_first_and_then_what_is_new(tmp_path: Path) -> None:
    output = worker_files(tmp_path, 1) / "output.log"
    output.write_bytes(b"one\ntwo\nthree\n")
    folder = run_folder(str(tmp_path), "cats")
    first, known = read_output(folder, {}, last_lines=2)
    assert first == {"n1/0": "two\nthree\n"}
    assert read_output(folder, known, last_lines=2) == ({}, known)
    with output.open("ab") as file:
        file.write(b"four\nfi")
    assert read_output(folder, known, last_lines=2)[0] == {"n1/0": "four\nfi\n"}
    news, known = read_output(folder, known, last_lines=2, follows=True)
    assert news == {"n1/0": "four\n"}
    with output.open("ab") as file:
        file.write(b"ve\n")
    assert read_output(folder, known, last_lines=2, follows=True)[0] == {"n1/0": "five\n"}


def test_all_files_of_all_nodes_in_the_folder_are_read(tmp_path: Path) -> None:
    for node_id in ("host:a", "b"):
        folder = worker_files(tmp_path, 3, node_id)
        (folder / "stdout.log").write_text(f"out of {node_id}\n")
        (folder / "stderr.log").write_text(f"err of {node_id}")
        (folder / "error.json").write_text("{}")
    folder = run_folder(str(tmp_path), "cats")
    output, _ = read_output(folder, {}, last_lines=9)
    assert output == {"b/0": "err of b\nout of b\n", "host:a/0": "err of host:a\nout of host:a\n"}
    assert read_output(folder, {}, "host:a", last_lines=9)[0].keys() == {"host:a/0"}
    assert read_output(folder, {}, "host:a", 1, last_lines=9)[0] == {}


def test_the_rest_of_a_generation_comes_before_the_next_one_from_its_first_line(tmp_path: Path) -> None:
    first = worker_files(tmp_path, 1) / "output.log"
    first.write_text("a\nb\n")
    folder = run_folder(str(tmp_path), "cats")
    output, known = read_output(folder, {}, last_lines=1, follows=True)
    assert without_heads(output) == {"n1/0": ["b"]}
    with first.open("a") as file:
        file.write("error, and no end of the line")
    (worker_files(tmp_path, 2) / "output.log").write_text("c\nd\n")
    news, known = read_output(folder, known, last_lines=1, follows=True)
    assert news == {"n1/0": "error, and no end of the line\nc\nd\n"}
    assert read_output(folder, known, last_lines=1, follows=True)[0] == {}
    assert read_output(folder, {}, last_lines=9)[0] == {"n1/0": "c\nd\n"}
    earlier = read_output(folder, {}, generation=1, last_lines=9)[0]
    assert earlier == {"n1/0": "a\nb\nerror, and no end of the line\n"}


def test_generations_that_came_and_went_between_two_readings_are_read(tmp_path: Path) -> None:
    folder = run_folder(str(tmp_path), "cats")
    (worker_files(tmp_path, 1) / "output.log").write_text("first\n")
    _, known = read_output(folder, {}, last_lines=1, follows=True)
    for generation in (2, 3, 4):
        (worker_files(tmp_path, generation) / "output.log").write_text(f"of {generation}\n")
    news, known = read_output(folder, known, last_lines=1, follows=True)
    assert news == {"n1/0": "of 2\nof 3\nof 4\n"}
    assert read_output(folder, known, last_lines=1, follows=True)[0] == {}


def test_of_more_than_is_allowed_the_newest_part_is_read(tmp_path: Path) -> None:
    folder = worker_files(tmp_path, 1)
    names = ("stdout.log", "stderr.log")
    for name in names:
        (folder / name).write_bytes(b"x" * 9999 + b"\n")
    read = read_output(run_folder(str(tmp_path), "cats"), {}, last_lines=10**6, most_bytes=200)[0]["n1/0"]
    assert read.count("… 9.9 kB left out; the whole output is in ") == 2
    assert all(f":{folder / name}\n" in read for name in names)
    assert without_heads({"n1/0": read})["n1/0"] == ["x" * 99] * 2


def test_what_the_limit_of_logs_removed_is_not_shown_as_zeros(tmp_path: Path) -> None:
    output = KeptOutput(str(worker_files(tmp_path, 1) / "output.log"), 60_000, SimpleQueue())
    for _ in range(200):
        output.write(b"line\n" * 1000, 0)
    folder = run_folder(str(tmp_path), "cats")
    read = read_output(folder, {}, last_lines=10**6, most_bytes=2**20)[0]["n1/0"]
    assert "\0" not in read
    assert "output was removed here" in read


def test_the_folder_of_an_earlier_run_and_a_missing_one_are_nothing_to_read(tmp_path: Path) -> None:
    (worker_files(tmp_path, 1) / "output.log").write_text("of an earlier run\n")
    (worker_files(tmp_path, 1) / "output.log").write_text("of this run\n")
    folder = run_folder(str(tmp_path), "cats")
    assert read_output(folder, {}, last_lines=9)[0] == {"n1/0": "of this run\n"}
    assert read_output(tmp_path / "none", {}, last_lines=9) == ({}, {})
