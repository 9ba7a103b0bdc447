"""A wrong value gets one line: what was given, where, what is accepted."""

from __future__ import annotations

import os
import py_compile
import sys
import zipfile
from pathlib import Path

import pytest

from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.load import load_settings
from elastic_agent.config.script import check_source
from tests.config.support import Shell

# Options in one string, then what the line must contain besides the option and the value in quotes.
WRONG_VALUES = [
    ("--nnodes=0", ["N or MIN:MAX"]),
    ("--nnodes=4:1", ["minimum 4", "maximum 1", "N or MIN:MAX"]),
    ("--nnodes=", ["N or MIN:MAX"]),
    ("--nproc-per-node=0", ["starts no workers", "whole number, 1 or more", "auto, cpu, gpu, xpu"]),
    ("--nproc-per-node=gpus", ["did you mean gpu?"]),
    ("--nproc-per-node=²", ["1 or more"]),
    ("--max-restarts=1.5", ["whole number"]),
    ("--max-restarts=99999999999", ["more than"]),
    ("--lease-ttl=0.4", ["0.5 or more"]),
    ("--lease-ttl=nan", ["seconds"]),
    ("--lease-ttl=4000", ["3600 at most"]),
    ("--join-timeout=1e300", ["more than"]),
    ("--fence-margin=0", ["more than 0"]),
    ("--settle=-1", ["0 or more"]),
    ("--settle=10m", ["number of seconds"]),
    ("--log-limit=big", ["is not a valid size", "500M or 2G"]),
    ("--log-limit=2X", ["is not a valid size", "units K, M, G, T"]),
    ("--log-limit=10", ["is 10 bytes, too small", "64K or more, or 0"]),
    ("--log-limit=2000T", ["more than 1024T"]),
    ("--rdzv-endpoint=http://node0:29400", ["is a URL", "HOST, HOST:PORT or [IPV6]:PORT"]),
    ("--rdzv-endpoint=node0:port", ['"port" is not a number']),
    ("--rdzv-endpoint=node0:70000", ["70000", "0 to 65535"]),
    ("--rdzv-endpoint=:29400", ["has no host"]),
    ("--rdzv-endpoint=a,b", ["store together", "one, three or five"]),
    ("--rdzv-endpoint=a,b,c,d", ["store together", "one, three or five"]),
    ("--rdzv-endpoint=a,b,a", ["store together", "one, three or five"]),
    ("--rdzv-endpoint=a,b,c:0", ["store together", "with a port from 1 to 65534"]),
    ("--rdzv-endpoint=[::1", ["brackets"]),
    ("--rdzv-endpoint=[node0]:1", ["is not an IP address"]),
    ("--rdzv-endpoint=10.0.0.300", ["is not an IP address"]),
    ("--rdzv-endpoint=my host", ["neither a host name nor an address"]),
    ("--rdzv-backend=etcd-v2", ["etcd 3.6 has removed", "c10d or etcd"]),
    ("--etcd-prefix=a b", ["--etcd-prefix", "a path like"]),
    ("--rdzv-backend=zeus", ["c10d"]),
    ("--rdzv-id=my run", ['character 3, " "', "A-Z a-z 0-9 . _ : @ + -"]),
    ("--rdzv-id=", ["empty", "1 to 128"]),
    ("--rdzv-id=" + "x" * 129, ["129 characters", "1 to 128"]),
    ("--rdzv-id=.", ["which file systems treat as a directory", "except . and .. alone"]),
    ("--node-id=..", ["which file systems treat as a directory"]),
    ("--node-rank=-1", ["0 or more"]),
    ("--master-port=0", ["1 to 65535"]),
    ("--port-range=30000", ["LOW:HIGH"]),
    ("--port-range=30100:30000", ["30100 is above", "LOW:HIGH"]),
    ("--redirects=4", ["0 (none)"]),
    ("--redirects=0:1,b:2", ['"b:2" is not RANK:STREAMS']),
    ("--local-ranks-filter=0,b", ["local ranks separated by commas"]),
    ("--local-ranks-filter=0,-1", ["negative"]),
    ("--numa-binding=nod", ["node, socket, exclusive or core-complex", "did you mean node?"]),
    ("--python-exec=/no/such/python", ["which is not an executable file", "name on the PATH"]),
    ("--python-exec=no-such-python", ["which was not found on the PATH"]),
    ("--start-method=thread", ["spawn, fork or forkserver"]),
    ("--signals-to-handle=SIGTRM", ['"SIGTRM"', "did you mean SIGTERM?"]),
    ("--signals-to-handle=SIGKILL", ["cannot be handled"]),
    ("--requeue=always", ["auto or never"]),
    ("--requeue-command=", ["empty", "single shell command line"]),
    ("--log-format=xml", ["auto, console or json"]),
    ("--log-level=loud", ["debug, info, warning or error"]),
    ("--state-dir=/dev/null/x", ["/dev/null is not a directory"]),
    ("--event-journal=/dev", ["which is a directory"]),
    ("--role=\n", ["printable"]),
]


def complaint(shell: Shell, argv: list[str], variables: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        shell.load(argv, variables)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(("option", "parts"), WRONG_VALUES, ids=[o[:40].strip() for o, _ in WRONG_VALUES])
def test_the_error_for_an_invalid_value_names_value_source_and_accepted_values(
    shell: Shell, option: str, parts: list[str]
) -> None:
    flag, value = option.split("=", 1)
    line = complaint(shell, [option])
    assert line.startswith(f"{flag}: got ")
    assert "; expected " in line
    assert value.strip("\n")[:20] in line
    for part in parts:
        assert part in line


def test_the_error_names_the_variable_or_the_key_in_the_file(shell: Shell) -> None:
    assert complaint(shell, [], {"PET_NNODES": "4:1"}).startswith('PET_NNODES: got "4:1", whose')
    file = shell.write("run.toml", "lease_ttl = 0.1\n")
    assert complaint(shell, ["--config", file]).startswith(f'{file}: lease_ttl: got "0.1", ')
    line = complaint(shell, [], {"PET_RDZV_CONF": "join_timeout=soon"})
    assert line.startswith('PET_RDZV_CONF: join_timeout: got "soon", ')


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--nnode-s", "2"],
            'unknown option "--nnode-s" (options of the script follow the script); did you mean',
        ),
        (["--lease_tl", "2"], "did you mean --lease-ttl?"),
        (["--zzzz"], "elastic-agent --help lists the options"),
        (["-x"], 'unknown option "-x"'),
        (["--nproc-per", "2"], "did you mean --nproc-per-node?"),
        (["--nproc", "2"], "did you mean --nproc-per-node?"),
        (["--max", "2"], "did you mean --max-restarts?"),
        (["--standalone=yes"], "--standalone: takes no value"),
        (["--hostfile", "hosts"], "use --hosts lab1,lab2:4"),
        (["--etcd-password", "hunter2"], "did you mean --etcd-password-file?"),
        (["--secret", "hunter2"], "did you mean --secret-file?"),
        (["--use_env"], "workers always find their local rank in LOCAL_RANK"),
        (["--num_gpus=2"], "use --nproc-per-node"),
        (["-m", "--no-python"], "--module and --no-python are mutually exclusive"),
        (["--rdzv-conf", "join_timout=9"], 'unknown key "join_timout"'),
        (["--rdzv-conf", "join_timout=9"], "did you mean join_timeout?"),
        (["--rdzv-conf", "join_timeout"], '"join_timeout" is not KEY=VALUE'),
    ],
)
def test_unknown_names_are_reported_with_a_suggestion(shell: Shell, argv: list[str], expected: str) -> None:
    assert expected in complaint(shell, argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--etcd-password", "hunter2"],
        ["--etcd-password=hunter2"],
        ["--etcd_pass", "hunter2"],
        ["--etcd-p=hunter2"],
        ["--secret", "hunter2"],
        ["--secret=hunter2"],
        ["--rdzv-endpoint", "http://trainer:hunter2@etcd1:2379"],
        ["--rdzv-endpoint", "trainer:hunter2@etcd1:2379"],
        ["--rdzv-endpoint", "etcd1,trainer:hunter2@etcd2"],
        ["--rdzv-endpoint", "trainer:hunter2/@@etcd1"],
        ["--master-addr", "trainer:hunter2@etcd1"],
        ["--rdzv-conf", "etcd_password=hunter2"],
        ["--rdzv-conf", "user=me,password=hunter2,oops"],
    ],
    ids=" ".join,
)
def test_a_password_in_an_error_is_masked(shell: Shell, argv: list[str]) -> None:
    assert "hunter2" not in complaint(shell, argv)
    assert "hunter2" not in complaint(shell, ["--rdzv-backend", "etcd", *argv])


def test_an_option_without_its_value_is_an_error(shell: Shell) -> None:
    with pytest.raises(UsageError, match=r"^--nnodes: requires a value; expected N or MIN:MAX"):
        load_settings(["--nnodes"], shell.environ)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lease_tl = 3\n", 'unknown key "lease_tl"; did you mean lease_ttl?'),
        ("[world]\nnnodes = 2\n", 'unknown key "world"'),
        ("config = 'x'\n", "cannot name another settings file"),
        ("lease_ttl = 1979-05-27\n", "lease_ttl: got a date"),
        ("lease_ttl = {a = 1}\n", "lease_ttl: got a table"),
        ("max_restarts = true\n", 'max_restarts: got "true"'),
        ("lease_ttl = \n", "not valid TOML: "),
        ("script = 3\n", "script: expected a string"),
        ("script_args = 'a b'\n", "script_args: expected a list of strings"),
    ],
)
def test_an_error_in_the_settings_file_names_the_file_and_key(shell: Shell, text: str, expected: str) -> None:
    file = shell.write("run.toml", text)
    line = complaint(shell, ["--config", file])
    assert line.startswith(file)
    assert expected in line


def test_an_unreadable_settings_file_is_an_error(shell: Shell) -> None:
    assert "No such file" in complaint(shell, ["--config", "/nowhere/run.toml"])
    assert "directory" in complaint(shell, [], {"ELASTIC_AGENT_CONFIG": str(shell.folder)})
    binary = shell.folder / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not valid TOML" in complaint(shell, ["--config", str(binary)])


def refused(shell: Shell, *argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_settings(argv, shell.environ)
    return str(caught.value)


def test_events_cannot_go_to_a_fifo_that_no_program_reads(shell: Shell, tmp_path: Path) -> None:
    """The agent would wait for the reader, without a word and without a lease."""
    os.mkfifo(tmp_path / "events")
    with pytest.raises(UsageError, match="which is a FIFO without a reader"):
        shell.load(["--event-journal", str(tmp_path / "events")])
    reader = os.open(tmp_path / "events", os.O_RDONLY | os.O_NONBLOCK)
    try:
        shell.load(["--event-journal", str(tmp_path / "events")])
    finally:
        os.close(reader)


NOTHING = "no script to run"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", NOTHING),
        ("--nnodes 1", NOTHING),
        ("FOLDER/missing.py", "script {} does not exist; expected a Python file"),
        ("FOLDER", "directory without __main__.py"),
        ("--run-path FOLDER/missing.py", "does not exist"),
        (
            "--nnodes 1:3 --rdzv-endpoint lab1:29400 FOLDER/missing.py",
            "does not exist; copy it to this machine, at the same path on all",
        ),
        ("--no-python no-such-program", 'program "no-such-program" was not found on the PATH'),
        ("--no-python FOLDER/plain", "is not an executable file"),
    ],
)
def test_what_cannot_be_started_is_an_error(shell: Shell, words: str, expected: str) -> None:
    shell.write("plain", "")
    found = refused(shell, *words.replace("FOLDER", str(shell.folder)).split())
    assert expected.format(quoted(str(shell.folder / "missing.py"))) in found


@pytest.mark.parametrize(
    "words", ["FOLDER", "--no-python sh", "--no-python FOLDER/train.py", "-m no.such.module"]
)
def test_what_can_be_started_is_no_error(shell: Shell, words: str) -> None:
    """A module is looked for later, and not as a file."""
    shell.write("__main__.py", "")
    load_settings(words.replace("FOLDER", str(shell.folder)).split(), shell.environ)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (b"import os\nlosses = [1, 2\nprint(losses)\n", "line 2: '[' was never closed"),
        (b"if True:\n\tx = 1\n        y = 2\n", "line 3: inconsistent use of tabs and spaces in indentation"),
        (b"x = 1\n  y = 2\n", "line 2: unexpected indent"),
        (b"return 1\n", "line 1: 'return' outside function"),
        (b"x = 1\n\0\n", "source code string cannot contain null bytes"),
        (b"print('\xff')\n", "line 1: (unicode error) 'utf-8' codec can't decode byte 0xff in position 0"),
    ],
)
def test_a_script_that_does_not_compile_is_an_error(shell: Shell, source: bytes, problem: str) -> None:
    script = shell.folder / "ddp.py"
    script.write_bytes(source)
    with pytest.raises(UsageError) as caught:
        check_source(str(script))
    assert str(caught.value).startswith(f"script {quoted(script)} does not compile: {problem}")
    assert str(caught.value).endswith("; nothing was started")
    assert [path.name for path in shell.folder.iterdir() if "cache" in path.name] == []


def test_what_python_may_run_is_no_error(shell: Shell, recwarn: pytest.WarningsRecorder) -> None:
    """Nor is what the workers complain of, and nothing is executed."""
    script = shell.folder / "ddp.py"
    script.write_text("print('\\d' is 'x')\nraise SystemExit(1)\n")
    check_source(str(script))
    deep = shell.folder / "deep.py"
    deep.write_text("x" + ".y" * 100000)
    check_source(str(deep))
    assert len(recwarn) == 0
    py_compile.compile(str(script), cfile=str(shell.folder / "compiled.py"))
    check_source(str(shell.folder / "compiled.py"))
    with zipfile.ZipFile(shell.folder / "packed.py", "w") as archive:
        archive.write(script, "__main__.py")
    check_source(str(shell.folder / "packed.py"))
    shell.write("train", "#!/bin/sh\nif true; then exit 1; fi\n")
    for other in ("train", "missing.py", "."):
        check_source(str(shell.folder / other))


@pytest.mark.parametrize(
    "folder", ["/var/spool/slurmd/job04711", "/var/lib/slurm/d/n1/job4711", "/tmp/job4711/x/.."]
)
def test_a_script_beside_slurms_copy_of_the_job_script_is_recognised(shell: Shell, folder: str) -> None:
    def said(job: str) -> str:
        with pytest.raises(UsageError) as caught:
            shell.load([f"{folder}/train.py"], variables={"SLURM_JOB_ID": job} if job else {})
        return str(caught.value)

    assert (
        f'script "{folder}/train.py" does not exist; Slurm runs a copy of the job script from there'
        in said("4711")
    )
    assert "name the script with $SLURM_SUBMIT_DIR or an absolute path" in said("4711")
    for other in ("471", "47110", ""):
        assert "Slurm" not in said(other)


def test_a_mistyped_script_is_recognised(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.write("train_model.py", "")
    mistyped = str(shell.folder / "trian_model.py")
    assert "(did you mean train_model.py?); expected a Python file" in refused(shell, mistyped)
    monkeypatch.chdir(shell.folder)
    assert "(did you mean train_model.py?); expected a Python file" in refused(shell, "trian_model.py")
    assert "did you mean" not in refused(shell, "something_else.py")
    assert "did you mean" not in refused(shell, str(shell.folder / "no_folder" / "trian_model.py"))


@pytest.mark.parametrize("python", ["python", "python3.11", sys.executable])
def test_an_interpreter_before_the_script_is_recognised(shell: Shell, python: str) -> None:
    shell.write("train.py", "")
    assert "is an interpreter, not a script; leave it out: elastic-agent" in refused(
        shell, python, "train.py"
    )


def test_an_unreadable_script_is_an_error(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access  # to root every file is readable
    monkeypatch.setattr(os, "access", lambda path, mode: path != shell.script and access(path, mode))
    assert "is not readable by this user" in refused(shell, shell.script)


def test_run_path_takes_precedence_over_module_and_no_python_as_in_torchrun(shell: Shell) -> None:
    assert load_settings(["--run-path", "--no-python", "-m", shell.script], shell.environ).settings.run_path


def test_a_long_or_odd_value_stays_one_readable_line(shell: Shell) -> None:
    line = complaint(shell, ["--nnodes", "1\n2\x1b[31m" + "9" * 5000])
    assert "\\n" in line
    assert "\\x1b" in line
    assert len(line) < 300


def test_a_nul_in_script_args_is_an_error(shell: Shell) -> None:
    file = shell.write("run.toml", f'script = "{shell.script}"\nscript_args = ["a\\u0000b"]\n')
    with pytest.raises(UsageError, match="script_args: got a NUL character"):
        load_settings(["--config", file], shell.environ)


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "SLURM_LOCALID"])
def test_non_ascii_digits_are_not_numbers_of_slurm(shell: Shell, variable: str) -> None:
    step = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1"}
    shell.load([], {**step, variable: "²"})
