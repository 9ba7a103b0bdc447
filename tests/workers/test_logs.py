"""Checks where output goes, and what is kept."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from elastic_agent.workers.output.folders import LogFolders, file_safe, prune_runs
from elastic_agent.workers.output.generation_logs import Destinations, GenerationLogs, Streams
from tests.waiting import GUARD_S


def environments(slots: int = 1, generation: int = 1, run_id: str = "run") -> dict[int, dict[str, str]]:
    return {
        slot: {
            "ELASTIC_AGENT_RUN_ID": run_id,
            "ELASTIC_AGENT_NODE_ID": "n2",
            "ELASTIC_AGENT_GENERATION": str(generation),
            "TORCHELASTIC_RUN_ID": run_id,
        }
        for slot in range(slots)
    }


# --- destinations ---------------------------------------------------------------------------------


def shape(dest: Destinations | LogsDest) -> dict[str, dict[int, str]]:
    """Return the destination of each stream, without the directories."""
    streams = ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files")
    return {
        stream: {
            slot: path if path in ("", os.devnull) else os.path.join(*Path(path).parts[-2:])
            for slot, path in getattr(dest, stream).items()
        }
        for stream in streams
    }


settings = st.dictionaries(st.integers(0, 3), st.sampled_from([Streams(number) for number in range(4)]))


@given(
    redirects=settings, tee=settings, shown=st.sets(st.integers(0, 3)) | st.none(), slots=st.integers(1, 4)
)
def test_redirects_tee_and_filters_work_as_in_torchrun(
    tmp_path_factory: pytest.TempPathFactory,
    redirects: dict[int, Streams],
    tee: dict[int, Streams],
    shown: set[int] | None,
    slots: int,
) -> None:
    directory = tmp_path_factory.mktemp("logs")
    ours = GenerationLogs(str(directory / "ours"), redirects, tee, shown).reify(environments(slots))
    torchs = [{slot: Std(streams) for slot, streams in option.items()} for option in (redirects, tee)]
    theirs = DefaultLogsSpecs(str(directory / "theirs"), *torchs, shown).reify(environments(slots))
    assert shape(ours) == shape(theirs)


def test_output_files_have_the_documented_layout(tmp_path: Path) -> None:
    envs = environments(2, generation=7)
    dest = GenerationLogs(str(tmp_path), dict.fromkeys(envs, Streams.ALL)).reify(envs)
    node = tmp_path / "run" / "000007" / "n2"
    assert dest.stdouts == {slot: str(node / str(slot) / "stdout.log") for slot in range(2)}
    assert dest.stderrs == {slot: str(node / str(slot) / "stderr.log") for slot in range(2)}
    assert dest.error_files == {slot: str(node / str(slot) / "error.json") for slot in range(2)}
    assert envs[1]["TORCHELASTIC_ERROR_FILE"] == dest.error_files[1]
    assert dest.filtered_stdout == str(node / "filtered_stdout.log")
    assert dest.filtered_stderr == str(node / "filtered_stderr.log")
    assert (node / "1").is_dir()
    assert os.readlink(tmp_path / "run" / "latest") == "000007"


def test_dev_null_as_directory_means_no_files() -> None:
    envs = environments(2)
    every = dict.fromkeys(envs, Streams.ALL)
    logs = GenerationLogs(os.devnull, every, every)
    dest = logs.reify(envs)
    assert dest.stdouts == dest.stderrs == {0: "", 1: ""}
    assert dest.tee_stdouts == dest.tee_stderrs == {}
    assert envs[0]["TORCHELASTIC_ERROR_FILE"] == ""
    assert logs.root_log_dir == os.devnull


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ValueError, match="is a file"):
        GenerationLogs(str(path))
    with pytest.raises(ValueError, match=r"cannot create the log directory .*: Not a directory"):
        GenerationLogs(str(path / "below"))


def await_pruning() -> None:
    """Wait until everything that is removed in threads is gone."""
    for thread in threading.enumerate():
        if thread.name == "prune-logs":
            thread.join(GUARD_S)


# --- what is kept ---------------------------------------------------------------------------------


def test_the_newest_generations_are_kept(tmp_path: Path) -> None:
    logs = GenerationLogs(str(tmp_path), keep_generations=3)
    for generation in (1, 2, 5, 9, 10):
        logs.reify(environments(generation=generation))
        await_pruning()
    assert sorted(os.listdir(tmp_path / "run")) == ["000005", "000009", "000010", "latest"]
    assert os.readlink(tmp_path / "run" / "latest") == "000010"


def test_other_runs_and_other_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "run" / "notes").mkdir(parents=True)
    logs = GenerationLogs(str(tmp_path), keep_generations=1)
    logs.reify(environments(run_id="other"))
    logs.reify(environments(generation=1))
    logs.reify(environments(generation=2))
    await_pruning()
    assert sorted(os.listdir(tmp_path / "run")) == ["000002", "latest", "notes"]
    assert sorted(os.listdir(tmp_path / "other")) == ["000001", "latest"]


def test_a_run_of_the_same_name_neither_erases_nor_reads_old_files(tmp_path: Path) -> None:
    for content in ("first", "second", "third"):
        dest = GenerationLogs(str(tmp_path)).reify(environments())
        assert not os.path.exists(dest.error_files[0])
        Path(dest.error_files[0]).write_text(content)
    generation = tmp_path / "run" / "000001"
    assert {path.name: (path / "0" / "error.json").read_text() for path in generation.iterdir()} == {
        "n2": "third",
        "n2~1": "first",
        "n2~2": "second",
    }


def test_a_restarted_run_does_not_prune_generations_of_an_earlier_run(tmp_path: Path) -> None:
    logs = GenerationLogs(str(tmp_path), keep_generations=2)
    logs.reify(environments(generation=30))
    logs.reify(environments(generation=1))
    await_pruning()
    assert sorted(os.listdir(tmp_path / "run")) == ["000001", "000030", "latest"]
    assert os.readlink(tmp_path / "run" / "latest") == "000001"


def test_each_node_removes_its_own_folders_and_those_of_one_that_left_later(tmp_path: Path) -> None:
    left, stays = LogFolders(str(tmp_path), 1), LogFolders(str(tmp_path), 1)
    left.make("run", 1, "n1")
    LogFolders(str(tmp_path), 1).make("run", 1, "n2")
    for generation in (1, 2):
        stays.make("run", generation, "n2")
        await_pruning()
    assert os.listdir(tmp_path / "run" / "000001") == ["n1"], "n2 has removed n2 and n2~1"
    stays.make("run", 3, "n2")
    await_pruning()
    assert sorted(os.listdir(tmp_path / "run")) == ["000003", "latest"]


def test_a_start_does_not_wait_for_the_removal_of_old_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the agent waits here, it does not renew its lease."""
    answers, removed = threading.Event(), shutil.rmtree

    def hang(*args: Any, **kwargs: Any) -> None:
        assert answers.wait(GUARD_S)
        removed(*args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", hang)
    folders = LogFolders(str(tmp_path), 1)
    for generation in (1, 2):
        folders.make("run", generation, "n1")
    assert (tmp_path / "run" / "000002" / "n1").is_dir()
    assert (tmp_path / "run" / "000001" / "n1").is_dir()
    answers.set()
    await_pruning()
    assert sorted(os.listdir(tmp_path / "run")) == ["000002", "latest"]


# --- latest ---------------------------------------------------------------------------------------


def test_latest_names_the_run_that_was_started_last(tmp_path: Path) -> None:
    first, second = LogFolders(str(tmp_path), 20), LogFolders(str(tmp_path), 20)
    first.make("first", 1, "n1")
    second.make("second", 1, "n1")
    first.make("first", 2, "n1")  # a restart is no start
    assert os.readlink(tmp_path / "latest") == "second"
    assert (tmp_path / "latest" / "latest" / "n1").is_dir()


def test_a_run_id_may_be_latest(tmp_path: Path) -> None:
    LogFolders(str(tmp_path), 20).make("run", 1, "n1")
    directory = LogFolders(str(tmp_path), 20).make("latest", 1, "n1")
    assert directory == tmp_path / "%6Catest" / "000001" / "n1"
    assert os.readlink(tmp_path / "latest") == "%6Catest"


# --- unnamed runs ---------------------------------------------------------------------------------


def unnamed_run(log_dir: Path, run_id: str, age_s: float) -> LogFolders:
    """Begin a run whose agent lives until `close`; it began so long ago."""
    folders = LogFolders(str(log_dir), 20, keep_runs=1000)
    folders.make(run_id, 1, "n1")
    began = os.stat(log_dir).st_mtime - age_s
    os.utime(log_dir / run_id / ".unnamed-run", (began, began))
    return folders


def test_the_newest_unnamed_runs_and_those_with_a_live_agent_are_kept(tmp_path: Path) -> None:
    for age in (4, 3, 2, 1):
        folders = unnamed_run(tmp_path, f"run-{age}", age)
        if age != 3:
            folders.close()
    prune_runs(str(tmp_path), 2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "run-1", "run-2", "run-3"]


def test_named_runs_and_foreign_folders_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    LogFolders(str(tmp_path), 20).make("named", 1, "n1")
    unnamed_run(tmp_path, "named-since", 100).close()
    LogFolders(str(tmp_path), 20).make("named-since", 2, "n1")
    unnamed_run(tmp_path, "run-2", 2).close()
    unnamed_run(tmp_path, "run-1", 1).close()
    (tmp_path / "link").symlink_to("run-2")
    prune_runs(str(tmp_path), 1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "link", "named", "named-since", "notes", "run-1"]


def test_a_new_run_removes_old_ones(tmp_path: Path) -> None:
    unnamed_run(tmp_path, "run-old", 10).close()
    folders = LogFolders(str(tmp_path), 20, keep_runs=1)
    folders.make("run-new", 1, "n1")
    await_pruning()
    assert sorted(os.listdir(tmp_path)) == ["latest", "run-new"]
    folders.close()


@pytest.mark.parametrize("name", ["job-7_a.b", "n2", "日本"])
def test_ordinary_names_stay_readable(name: str) -> None:
    assert file_safe(name) == (name if name.isascii() else "%E6%97%A5%E6%9C%AC")


@given(st.lists(st.text(min_size=0, max_size=300), min_size=2, max_size=20, unique=True))
def test_different_names_become_different_file_names(names: list[str]) -> None:
    safe = [file_safe(name) for name in names]
    assert len(set(safe)) == len(names)
    for name in safe:
        assert name not in ("", ".", "..", "latest~1")
        assert not name.startswith(".")
        assert len(name.encode()) <= 120
        assert not set(name) & set("/\0\n ")
