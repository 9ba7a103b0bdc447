"""The command as a user types it: help, settings, version, mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from elastic_agent import __version__
from elastic_agent.cli.help import help_page
from elastic_agent.cli.main import COMMANDS, main
from elastic_agent.config.errors import quoted
from elastic_agent.config.settings import specs
from elastic_agent.exit_codes import MEANINGS, ExitCode
from tests.cli.support import COMMAND, clean_environment, elastic_agent, refusal

ANSWERED_AT_ONCE = {
    "help": ["--help"],
    "wrong value": ["--nproc-per-node", "0", "train.py"],
    "unknown option": ["--no-such-option", "train.py"],
    "no script": ["/nowhere/train.py"],
    "nothing": [],
    "settings": ["settings"],
    "help of serve": ["serve", "--help"],
    "mistake of serve": ["serve", "--log-level", "loud"],
}


@pytest.mark.parametrize("argv", ANSWERED_AT_ONCE.values(), ids=ANSWERED_AT_ONCE)
def test_help_and_errors_import_only_the_standard_library(argv: list[str]) -> None:
    program = (
        "import sys; before = set(sys.modules); from elastic_agent.cli.main import main; main(sys.argv[1:]);"
        "print('loaded', *sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *argv],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = {name.split(".")[0] for name in done.stderr.splitlines()[-1].split()[1:]}
    assert "argparse" in loaded
    assert sorted(loaded - sys.stdlib_module_names - {"elastic_agent"}) == []


@pytest.mark.parametrize("argv", [[], ["run"]], ids=["the name alone", "run"])
def test_without_arguments_the_commands_are_shown_and_the_error_comes_last(argv: list[str]) -> None:
    done = elastic_agent(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(f"elastic-agent {name} " in done.stderr for name, (*_, summary) in COMMANDS.items() if summary)
    assert "elastic-agent --help" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("elastic-agent: no script to run; expected: ")
    assert done.stderr.count("\n") <= 24, "one screen"


def test_any_other_mistake_without_a_script_is_one_line() -> None:
    refusal("--max-restarts", "1")  # a script's variable may be empty
    refusal(variables={"PET_NNODES": "0"})


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["run", "--help"], ["--nnodes", "0", "-h"]])
def test_help_is_printed_with_any_other_arguments(argv: list[str]) -> None:
    done = elastic_agent(*argv)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("Usage: elastic-agent [run] [OPTIONS] SCRIPT")


def test_help_shows_every_setting_with_its_default_and_every_exit_code() -> None:
    page = " ".join(help_page(100).split())
    for spec in specs():
        assert f" {spec.flag} " in page
        assert f"[default: {spec.shown_default}" in page
        assert spec.why in page
        assert spec.no_effect in page
    for code, meaning in MEANINGS.items():
        assert f"{int(code)} {meaning}" in page


@pytest.mark.parametrize("width", [60, 80, 110])
def test_help_fits_the_terminal(width: int) -> None:
    folded = help_page(width).split("World: nodes and workers")[1].split("Sources of a setting")[0]
    too_long = [line for line in folded.splitlines() if len(line) > width]
    assert [line for line in too_long if " " in line.strip()] == []


def test_the_version_is_printed() -> None:
    for argv in (["version"], ["--version"]):
        done = elastic_agent(*argv)
        assert done.returncode == 0
        assert done.stdout.startswith(f"elastic-agent {__version__} (Python 3.")
        assert "torch 2." in done.stdout
    assert elastic_agent("version", "please").returncode == 2
    assert elastic_agent("version", "--help").stdout.startswith("Usage: elastic-agent version")


def test_a_mistyped_command_is_recognised(tmp_path: Path) -> None:
    told = refusal("statsu")
    assert 'script "statsu" does not exist' in told
    assert told.endswith("; or did you mean the command elastic-agent status?\n")
    assert "did you mean" not in refusal("statsu.py")


def test_settings_prints_the_effective_settings_with_their_sources(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("settle = 2.5\n", encoding="utf-8")
    done = elastic_agent(
        "settings", "--config", str(file), "--max_restarts", "7", variables={"PET_ROLE": "trainer"}
    )
    assert done.returncode == 0, done.stderr
    table = tomllib.loads(done.stdout)
    assert (table["max_restarts"], table["settle"], table["role"]) == (7, 2.5, "trainer")
    assert re.search(r"^max_restarts = 7 +# --max-restarts$", done.stdout, re.MULTILINE)
    assert re.search(rf"^settle = 2.5 +# {re.escape(str(file))}: settle$", done.stdout, re.MULTILINE)
    assert re.search(r'^role = "trainer" +# PET_ROLE$', done.stdout, re.MULTILINE)
    assert re.search(r"^lease_ttl = 5.0 +# default$", done.stdout, re.MULTILINE)


def test_settings_rejects_what_run_would_reject() -> None:
    assert "requires a rendezvous endpoint" in refusal("settings", "--nnodes", "1:4")


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        ("drain --run", "drain: --run requires a value"),
        ("drain --forced=1", 'drain: unknown option "--forced"; expected --run, --user or --deadline'),
        ("drain a --run r b", 'drain: got "a b"; expected at most one node'),
        ("stop a", 'stop: got "a"; expected no arguments other than options'),
        (
            "stop --deadline=soon",
            'stop: --deadline: got "soon", which is not a number of seconds; expected seconds, 0 or more',
        ),
        ("stop --deadline -5", 'stop: --deadline: got "-5", which is too short; expected seconds, 0 or more'),
        (
            "stop --run no-such-run",
            "stop: no running agent of run no-such-run found on this machine for this user",
        ),
        ("status --frob", 'status: unknown option "--frob"; expected --'),
        ("why one two", 'why: got "one two"; expected at most one run id'),
        ("why --generation x", 'why: --generation: got "x"'),
        ("logs a b", 'logs: got "a b"; expected at most one NODE or NODE/SLOT'),
        ("logs a/b", "logs: got a/b; expected NODE or NODE/SLOT, such as n1/0"),
        ("logs -n x", 'logs: -n: got "x"'),
        (
            "logs --run no-such-run --log-dir /nowhere",
            "logs: no running agent of run no-such-run found on this",
        ),
        (
            "stacks no-such-run",
            "stacks: no running agent of run no-such-run found on this machine for this user",
        ),
        ("stacks a b", 'stacks: got "a b"; expected at most one run id'),
        ("stacks --user", "stacks: --user requires a value"),
        ("stacks --user no-such-user a", 'stacks: --user: got "no-such-user"; expected a user of this'),
    ],
)
def test_usage_errors_of_commands_are_one_line(
    argv: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv.split()) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert told.startswith(f"elastic-agent: {answer}")
    assert told.count("\n") == 1


def test_a_module_that_is_not_installed_starts_nothing() -> None:
    told = refusal("--standalone", "-m", "no_such_package.train")
    assert 'module "no_such_package.train" was not found from' in told


def test_the_reader_of_the_settings_may_close_the_pipe() -> None:
    writer = subprocess.Popen(
        [*COMMAND, "settings"], env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    errors = writer.stderr.read().decode()
    writer.stderr.close()
    assert writer.wait(timeout=60) == 0
    assert errors == ""


def test_a_script_with_the_name_of_a_command_can_be_run(tmp_path: Path) -> None:
    """Seen by the complaint about a script that is missing, which shows what was taken for the script."""
    for argv in (
        ["run", "settings"],
        ["./settings"],
        ["run", "./version"],
        ["--max-restarts", "1", "version"],
    ):
        assert f'script "{argv[-1]}" does not exist' in refusal(*argv)


def test_a_script_that_does_not_compile_is_not_started(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text("print('started')\ndef f(:\n")
    for more in ([], ["--rdzv-endpoint", "127.0.0.1:1", "--nnodes", "3"]):
        problem = "does not compile: line 2: invalid syntax; nothing was started"
        assert refusal(*more, str(script)) == f"elastic-agent: script {quoted(script)} {problem}\n"


@pytest.mark.parametrize(
    "argv",
    [["train.py"], ["/bin/true.py"], ["-m", "http.server"], ["serve"], ["doctor", "--alone", "/bin/true.py"]],
    ids=lambda argv: argv[-1],
)
def test_a_removed_working_directory_is_refused(tmp_path: Path, argv: list[str]) -> None:
    """torch cannot be loaded there: its MKL ends the process with a line of its own that explains nothing."""
    leaving = ["sh", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "sh"]
    told = refusal(*argv, under=["env", "-C", str(tmp_path), *leaving])
    assert told.startswith("elastic-agent: the working directory is not accessible: No such file")


@pytest.mark.parametrize("argv", [["settings"], ["--help"], ["version"]], ids=lambda argv: argv[-1])
def test_output_that_cannot_be_written_is_reported_in_one_line(argv: list[str]) -> None:
    told = refusal(*argv, under=["sh", "-c", 'exec "$@" > /dev/full', "sh"])
    assert told == "elastic-agent: cannot write the output: No space left on device\n"


def test_an_error_has_its_exit_code_if_no_message_can_be_written() -> None:
    done = elastic_agent("--nnodes", "0", "train.py", under=["sh", "-c", 'exec "$@" 2> /dev/full', "sh"])
    assert done.returncode == 2


def test_a_script_from_a_pipe_is_refused() -> None:
    """Reading it for the first time would leave nothing for the workers: they would do nothing and succeed."""
    told = refusal("/dev/stdin", under=["sh", "-c", 'echo "raise SystemExit(7)" | "$@"', "sh"])
    assert 'script "/dev/stdin" is a pipe, which can be read only once' in told


@pytest.mark.parametrize(
    "options", [("--numa-binding", "node"), ("--nproc-per-node", "gpu"), ("--nproc-per-node", "xpu")]
)
def test_what_needs_a_gpu_is_refused_without_one_and_doctor_says_so(
    tmp_path: Path, options: tuple[str, str]
) -> None:
    if torch.cuda.is_available() or torch.xpu.is_available():
        pytest.skip("this machine has a GPU")
    script = tmp_path / "train.py"
    script.write_text("")
    words = [*options, "--state-dir", str(tmp_path / "state"), str(script)]
    done = elastic_agent(*words)
    assert done.returncode == 2
    assert f"elastic-agent: {' '.join(options)}: " in done.stderr
    assert "Traceback" not in done.stderr
    examined = elastic_agent("doctor", "--alone", *words)
    assert examined.returncode == 1
    refusal = done.stderr.removeprefix("elastic-agent: ").strip()
    assert refusal.replace("; ", ". Remedy: ", 1) in examined.stdout
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("before", [[], ["--"], ["--nodes", "2", "--separate-folders", "--"], ["--nodes=2"]])
def test_chaos_leaves_the_script_its_own_dashes(before: list[str], tmp_path: Path) -> None:
    told = refusal("chaos", *before, str(tmp_path / "train.py"), "--flag", "--", "--nodes", "rest")
    problem = "does not exist; expected a Python script, or -m MODULE"
    assert told == f"elastic-agent: chaos: the script {quoted(tmp_path / 'train.py')} {problem}\n"
