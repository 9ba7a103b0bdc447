"""One terminal for several machines: what each host is told, and a whole run through an ssh that stays on this one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent import linux
from elastic_agent.config.load import resolve
from elastic_agent.config.sources.command_line import parse_command_line
from elastic_agent.config.value_types import Host
from elastic_agent.exit_codes import ExitCode
from elastic_agent.files import locked
from elastic_agent.launcher import hosts, on_host
from elastic_agent.launcher.hosts import TRAVELLING, options_of
from elastic_agent.launcher.on_host import Order, limit_log, take_out_middle
from elastic_agent.workers.output.folders import KEPT_RUNS
from tests.cli.support import COMMAND, LONG_LEASE, clean_environment, refusal
from tests.names import unique
from tests.ports import free_port
from tests.waiting import GUARD_S, wait_for
from tests.workers.test_kept_output import LIMIT, LINE_BYTES, PART, kept_in, lines, taken

SSH = """\
#!/bin/bash
# Stays on this machine; each host has a state directory of its own, and nobody is at home at "away".
host=${@: -2:1}
if [ "$host" = away ]; then
    echo "ssh: connect to host away port 22: No route to host" >&2
    exit 255
fi
if [ "$host" = bare ]; then
    echo "bash: line 1: python: No such file or directory" >&2
    exit 127
fi
if [ "$host" = mute ]; then
    sleep 1000000
fi
export ELASTIC_AGENT_STATE_DIR=%(folder)s/$host ELASTIC_AGENT_SET_NODE_ID=$host
cd /
sh -c "echo Welcome to $host; ${@: -1}"
exit $?  # not exec: the end of ssh is the end of the command's standard input, and no signal
"""

TRAIN = r"""\
import os, sys, time
from pathlib import Path
from elastic_agent import client
placement = client.current().placement
def say(text):
    os.write(1, f"worker {placement.rank} of {placement.world_size} {text}\n".encode())
say("trains \u2713")
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
    client.heartbeat()
    if client.notice() is not None:
        say("has saved")
        client.leave()
"""


def told(*argv: str) -> list[str]:
    """The options of each host's agent."""
    line = parse_command_line([*argv, "-m", "this"])
    return options_of(line, resolve(line, {"HOME": "/nowhere"}), "cats")


def test_any_number_of_hosts_suffices_and_the_first_one_hosts_the_store() -> None:
    options = told("--hosts", "me@lab1,lab2:4")
    assert {"--hosts=", "--nnodes=1:2", "--rdzv-endpoint=lab1:29400", "--rdzv-id=cats"} <= {*options}
    assert "--rdzv-endpoint=[fe80::1]:29400" in told("--hosts", "fe80::1,me@[fe80::2]:2")


def test_what_does_not_apply_is_not_sent() -> None:
    options = told("--hosts=lab1", "--rdzv-endpoint=localhost:0")
    assert "--rdzv-endpoint=localhost:0" in options
    assert [option for option in options if "None" in option] == []


def test_a_host_that_is_slow_to_start_comes_into_the_first_world_unless_the_user_says_otherwise() -> None:
    assert "--settle=20" in told("--hosts", "lab1,lab2")
    given = told("--hosts", "lab1,lab2", "--settle", "3")
    assert [option for option in given if "settle" in option] == ["--settle=3"]


def test_what_the_user_says_goes_to_every_host() -> None:
    options = told(
        "--hosts=lab1,lab2", "--nnodes", "2", "--rdzv-endpoint", "head:1", "-t", "3", "--finish-once"
    )
    assert {"--nnodes=2", "--rdzv-endpoint=head:1", "--tee=3", "--finish-once", "--module"} <= {*options}


@pytest.mark.parametrize(
    ("argv", "wrong"),
    [
        (["lab1,,lab2"], 'whose host "" is neither a host name nor an address'),
        (["lab1,lab2:0"], "which starts no workers"),
        (["-oProxyCommand=x"], "is neither a host name nor an address"),
        (["localhost,lab2"], "localhost is another machine on each; expected the name"),
        (["lab1", "--standalone"], "--standalone: "),
        (["lab1,lab2,me@lab1:2"], "which names a host twice; expected HOST:WORKERS for several workers"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], wrong: str) -> None:
    assert wrong in refusal(f"--hosts={argv[0]}", *argv[1:], "-m", "this")


def test_a_function_is_started_on_one_machine_only() -> None:
    folder = {"ELASTIC_AGENT_LAUNCH_FOLDER": "/nowhere"}
    assert "not for elastic_agent.launch" in refusal("--hosts=lab1", "-m", "this", variables=folder)


def test_variables_that_workers_need_go_to_every_host_and_those_of_this_machine_stay_here() -> None:
    need = {"NCCL_DEBUG", "PYTHONPATH", "TORCH_LOGS", "ELASTIC_AGENT_SECRET", "WANDB_MODE"}
    stay = {"PATH", "HOME", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "LD_LIBRARY_PATH"}
    assert {name for name in need | stay if TRAVELLING.match(name)} == need


class Desk:
    """The folder with the script, and the terminal."""

    run_id: str | None

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_id, self.endpoint = folder, unique("desk"), f"127.0.0.1:{free_port()}"
        self.started: list[subprocess.Popen[bytes]] = []
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(SSH % {"folder": folder})
        (folder / "bin" / "ssh").chmod(0o755)
        (folder / "train.py").write_text(TRAIN)

    def start(self, hosts: str, *options: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        named = ["--rdzv-id", self.run_id] if self.run_id else []
        argv = [*COMMAND, "--hosts", hosts, *named, "--rdzv-endpoint", self.endpoint]
        variables = {
            **LONG_LEASE,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONIOENCODING": "ascii",
        }
        with (self.folder / f"terminal-{len(self.started)}").open("wb") as terminal:
            process = subprocess.Popen(
                [*argv, *options, "train.py", str(self.folder / "finish")],
                cwd=self.folder,
                env=clean_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=terminal if stdout is None else stdout,
                stderr=terminal,
            )
        self.started.append(process)
        return process

    def said(self, number: int = -1) -> str:
        return (self.folder / f"terminal-{number % len(self.started)}").read_text(encoding="utf-8")

    def wait_said(self, *texts: str) -> None:
        wait_for(f"{texts} in {self.said()}", lambda: all(text in self.said() for text in texts) or None)

    def processes(self) -> list[int]:
        """All that was started for this run and lives: the name of the folder is in its environment."""
        return [pid for pid in linux.process_ids() if str(self.folder).encode() in _environment(pid)]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it is gone
        return b""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    (tmp_path / "finish").touch()  # the end also of a run that has outlived its terminal
    for process in desk.started:
        if process.poll() is None:  # a test failed: ended as by a user
            for _ in range(2):
                process.send_signal(signal.SIGINT)
            process.wait(GUARD_S)


@pytest.mark.system
def test_a_run_outlives_its_terminal(desk: Desk) -> None:
    first = desk.start("lab1,lab2:2,away", "--settle=1")
    desk.wait_said("lab1: worker 0 of 3 trains", "lab2: worker 1 of 3 trains", "lab2: worker 2 of 3 trains")
    assert "elastic-agent: away cannot be reached: ssh: connect to host away port 22: No route" in desk.said()
    assert "Welcome" not in desk.said()
    first.send_signal(signal.SIGHUP)
    assert first.wait(GUARD_S) == 128 + signal.SIGHUP

    assert desk.start("lab1,lab2:2").wait(GUARD_S) == ExitCode.TOO_FEW_NODES
    assert f"lab2: run {desk.run_id} runs here; wait for its end, or elastic-agent stop" in desk.said()
    (desk.folder / "finish").touch()
    wait_for("the end of all processes", lambda: not desk.processes() or None)
    logs = [*desk.folder.glob(f"lab[12]/hosts/{desk.run_id}/*.log")]
    assert ["the run finished" in log.read_text(encoding="utf-8") for log in logs] == [True, True]


@pytest.mark.system
def test_a_run_outlives_the_reader_of_its_output(desk: Desk) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = desk.start("lab1", stdout=writing)
    os.close(writing)
    assert process.wait(GUARD_S) == 128 + signal.SIGPIPE, desk.said()
    assert "cannot write the output: Broken pipe; the run goes on" in desk.said()
    (desk.folder / "finish").touch()
    wait_for("the end of all processes", lambda: not desk.processes() or None)
    logs = [*desk.folder.glob(f"lab1/hosts/{desk.run_id}/*.log")]
    assert ["the run finished" in log.read_text(encoding="utf-8") for log in logs] == [True]


@pytest.mark.system
def test_ctrl_c_stops_the_run_on_all_hosts(desk: Desk) -> None:
    process = desk.start("lab1,lab2")
    desk.wait_said("lab1: worker 0 of 2 trains \u2713", "lab2: worker 1 of 2 trains \u2713")
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in desk.processes()]
    assert sum(b"--settle=20" in words for words in commands) == 2
    process.send_signal(signal.SIGINT)
    assert process.wait(GUARD_S) == ExitCode.STOPPED, desk.said()
    assert all(f"worker {rank} of 2 has saved" in desk.said() for rank in range(2))
    wait_for("the end of all processes", lambda: not desk.processes() or None)


@pytest.mark.system
@pytest.mark.parametrize("signals", [1, 2], ids=["stopped", "killed"])
def test_a_run_whose_id_was_generated_is_resumed_as_the_last_line_says(desk: Desk, signals: int) -> None:
    desk.run_id = None
    process = desk.start("lab1,lab2")
    desk.wait_said("lab1: worker 0 of 2 trains", "lab2: worker 1 of 2 trains")
    process.send_signal(signal.SIGINT)
    if signals > 1:
        desk.wait_said("stopping the run; Ctrl-C again kills its workers")
        process.send_signal(signal.SIGINT)
    assert process.wait(GUARD_S) == (ExitCode.STOPPED if signals == 1 else ExitCode.INTERRUPTED)
    said = (
        "elastic-agent: to resume the run on all hosts, give the same command here again, with --rdzv-id (.*)"
    )
    told = re.fullmatch(said, desk.said().splitlines()[-1])
    assert told, desk.said()
    wait_for("the end of all processes", lambda: not desk.processes() or None)
    (desk.folder / "finish").touch()
    assert desk.start("lab1,lab2", f"--rdzv-id={told[1]}").wait(GUARD_S) == ExitCode.FINISHED, desk.said()
    assert re.search(rf"\[{told[1]} lab1 g[23]\] ", desk.said()), "a new run"


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (
            "lab1,away",
            "away cannot be reached: ssh: connect to host away port 22: No route to host; try: ssh",
        ),
        (
            "lab1,bare",
            "bash: line 1: python: No such file or directory; expected elastic-agent there, as here",
        ),
    ],
)
def test_a_start_that_is_refused_is_a_line_and_leaves_nothing(desk: Desk, hosts: str, said: str) -> None:
    assert desk.start(hosts, "--nnodes", "2").wait(GUARD_S) == ExitCode.TOO_FEW_NODES
    assert said in desk.said()
    assert "nothing started: 1 of 2 hosts can be used" in desk.said()
    assert len(desk.said().splitlines()) == 2
    wait_for("the end of all processes", lambda: not desk.processes() or None)
    assert [*desk.folder.glob("lab1/hosts/*")] == []


def test_a_host_that_does_not_answer_is_a_line(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{desk.folder}/bin", prepend=os.pathsep)
    monkeypatch.setattr(hosts, "ANSWER_S", 0.1)
    connection = hosts.Connection(Host("mute", "mute", "mute", ""))
    with connection.process:
        problem = connection.examine(Order("token", "/", [], [], {}, "cats"))
    assert re.fullmatch("mute has not answered within 0.1 s: no output; see whether .* answer", problem)
    wait_for("the end of all processes", lambda: not desk.processes() or None)


def test_logs_of_older_runs_without_an_id_are_removed_unless_they_run(desk: Desk) -> None:
    log_name = f"{os.uname().nodename}.log"
    logs = [
        desk.folder / "lab1" / "hosts" / f"run-{number:08x}" / log_name for number in range(KEPT_RUNS + 3)
    ]
    for number, log in enumerate(logs):
        log.parent.mkdir(parents=True)
        log.write_text("it ran\n")
        os.utime(log, (number, number))
    with locked(logs[1]):
        assert desk.start("lab1,away", "--nnodes=2").wait(GUARD_S) == ExitCode.TOO_FEW_NODES
        wait_for("the end of all processes", lambda: not desk.processes() or None)
    assert [log.exists() for log in logs[:4]] == [False, True, False, True]
    assert not logs[0].parent.exists()


def test_of_a_larger_log_the_beginning_and_the_end_are_kept_while_it_is_written(tmp_path: Path) -> None:
    log, count = tmp_path / "log", 60001
    log.write_bytes(lines(0, LIMIT // LINE_BYTES))
    take_out_middle(str(log), LIMIT)
    assert log.read_bytes() == lines(0, LIMIT // LINE_BYTES), "it is not larger yet"
    code = f"""
import os
for number in range({LIMIT // LINE_BYTES}, {count}):
    os.write(1, b"%0{LINE_BYTES - 1}d\\n" % number)
"""
    with log.open("ab") as file, subprocess.Popen([sys.executable, "-S", "-c", code], stdout=file) as writer:
        while writer.poll() is None:
            take_out_middle(str(log), LIMIT)
    assert writer.returncode == 0
    take_out_middle(str(log), LIMIT)
    assert taken(log) <= LIMIT
    assert log.stat().st_size == count * LINE_BYTES, "who follows the file goes on where it was"
    first, last = kept_in(log.read_bytes())
    assert first == [*range(PART // LINE_BYTES)]
    assert last == [*range(last[0], count)], "in order, without a gap"
    assert len(last) >= PART // LINE_BYTES - 1


def test_a_log_where_files_have_no_holes_stays_whole_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linux, "_FALLOC_FL_PUNCH_HOLE", 0x4000)  # no such operation
    limit_log(str(tmp_path / "removed"), LIMIT)
    assert caplog.messages == []
    log, content = tmp_path / "log", lines(0, 2 * LIMIT // LINE_BYTES)
    with log.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # it takes its space now
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        assert log.read_bytes() == content
        pauses.append(seconds)
        if len(pauses) == 2:
            log.unlink()

    monkeypatch.setattr(on_host.time, "sleep", pause)
    limit_log(str(log), LIMIT)
    (warning,) = caplog.messages
    assert f"cannot limit the size of {log}: the file system cannot make holes in files" in warning
    assert len(pauses) == 2
