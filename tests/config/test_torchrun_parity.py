"""A torchrun command line works when only its first word changes: checked against torch's own parser."""

from __future__ import annotations

import argparse
import contextlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing import Std, to_map
from torch.distributed.run import get_args_parser

from elastic_agent.config import value_types
from elastic_agent.config.settings import spec_by_name
from elastic_agent.config.sources.command_line import parse_command_line
from tests.config.support import Shell

TORCHS_PARSER = get_args_parser()
TORCHRUN = [action for action in TORCHS_PARSER._actions if action.option_strings and action.dest != "help"]

# For each option: a text that torchrun accepts, and the value it means here.
SAMPLES: dict[str, tuple[str, object]] = {
    "nnodes": ("1:1", "1"),
    "nproc_per_node": ("auto", "auto"),
    "rdzv_backend": ("static", "c10d"),
    "rdzv_endpoint": ("node0:1234", "node0:1234"),
    "rdzv_id": ("job-7", "job-7"),
    "rdzv_conf": ("join_timeout=77,is_host=1", "join_timeout=77,is_host=1"),
    "max_restarts": ("7", "7"),
    "monitor_interval": ("0.5", "0.5"),
    "start_method": ("forkserver", "forkserver"),
    "event_log_handler": ("console", "console"),
    "role": ("trainer", "trainer"),
    "log_dir": ("/tmp/logs-of-test", "/tmp/logs-of-test"),
    "redirects": ("0:1,1:2", "0:1,1:2"),
    "tee": ("3", "3"),
    "local_ranks_filter": ("0,2", "0,2"),
    "duplicate_stdout_filters": ("apple,a,,b", "apple,a,,b"),
    "duplicate_stderr_filters": ("pear", "pear"),
    "node_rank": ("1", "1"),
    "master_addr": ("node0", "node0"),
    "master_port": ("1234", "1234"),
    "local_addr": ("10.0.0.1", "10.0.0.1"),
    "logs_specs": ("mine", "mine"),
    "numa_binding": ("node", "node"),
    "signals_to_handle": ("SIGTERM,SIGUSR1", "SIGTERM,SIGUSR1"),
    "shutdown_timeout": ("12", "12.0"),
}


def shown(shell: Shell, name: str, argv: list[str], variables: dict[str, str] | None = None) -> str:
    """A setting's value as its text."""
    value = getattr(shell.load(argv, variables).settings, name)
    return spec_by_name()[name].kind.show(value)


def is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


def test_there_is_a_sample_for_every_option_torchrun_has() -> None:
    assert {a.dest for a in TORCHRUN if not is_switch(a)} == set(SAMPLES)


@pytest.mark.parametrize(
    ("action", "spelling"),
    [pytest.param(action, s, id=s) for action in TORCHRUN for s in action.option_strings],
)
def test_every_spelling_of_every_torchrun_option_is_accepted(
    shell: Shell, action: argparse.Action, spelling: str
) -> None:
    if is_switch(action):
        argv, expected = [spelling], "true"
    else:
        text, value = SAMPLES[action.dest]
        argv, expected = [spelling, text], str(value)
    assert shown(shell, action.dest, argv) == expected


@pytest.mark.parametrize("action", [pytest.param(a, id=a.dest) for a in TORCHRUN])
def test_the_pet_variable_of_every_torchrun_option_is_honoured(shell: Shell, action: argparse.Action) -> None:
    text, expected = ("1", "true") if is_switch(action) else SAMPLES[action.dest]
    variable = f"PET_{action.dest.upper()}"
    assert shown(shell, action.dest, [], {variable: text}) == str(expected)
    assert shell.load([], {variable: text}).sources[action.dest].name == variable


def test_a_switch_variable_of_zero_is_off_as_in_torchrun(shell: Shell) -> None:
    assert shell.load([], {"PET_MODULE": "0"}).settings.module is False
    assert shell.load(["-m"], {"PET_MODULE": "0"}).settings.module is True


@pytest.mark.parametrize("action", [pytest.param(a, id=a.dest) for a in TORCHRUN if a.choices])
def test_the_choices_of_options_are_those_of_torch(shell: Shell, action: argparse.Action) -> None:
    for choice in action.choices or ():
        assert shown(shell, action.dest, [f"--{action.dest}", choice]) == choice


def torchs_view(argv: list[str]) -> argparse.Namespace | None:
    """Return what torchrun makes of a command line, or None when it refuses it."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return TORCHS_PARSER.parse_args(argv)
        except SystemExit:
            return None


REMAINDERS = [
    ["train.py"],
    ["train.py", "--epochs", "3"],
    ["train.py", "--nnodes", "9"],
    ["--", "train.py", "--epochs", "3"],
    ["--standalone", "--", "train.py", "-m"],
    ["train.py", "--", "--epochs", "3"],
    ["train.py", "a", "--", "b"],
    ["train.py", "--", "a", "--", "b"],
    ["-m", "package.module", "-m", "--help"],
    ["-r", "3", "-t3", "train.py", "-t", "1"],
    ["-mr3", "train.py"],
    ["-r=3", "train.py"],
    ["--nnodes=1:1", "train.py", "", "--flag="],
    ["--nnodes", "1", "--nnodes", "1:1", "train.py"],
    ["train.py", "--help"],
]


@pytest.mark.parametrize("argv", REMAINDERS, ids=" ".join)
def test_script_arguments_are_separated_as_by_torchrun(argv: list[str]) -> None:
    view = torchs_view(argv)
    assert view is not None
    line = parse_command_line(argv)
    assert line.script == view.training_script
    assert list(line.script_args) == view.training_script_args
    for name, found in line.given.items():
        seen = getattr(view, name)
        assert found.text == ("true" if seen is True else seen)
    changed = {name for name, value in vars(view).items() if value != TORCHS_PARSER.get_default(name)}
    assert changed - {"training_script", "training_script_args"} <= set(line.given)


def test_torchrun_commands_from_its_own_documentation_work(shell: Shell) -> None:
    single = shell.load(["--standalone", "--nnodes=1", "--nproc-per-node=4"])
    assert single.settings.standalone
    stacked = shell.load(["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1"])
    assert stacked.settings.standalone
    assert stacked.settings.rdzv_endpoint is None
    fixed = shell.load(
        ["--nnodes=2", "--max-restarts=3", "--rdzv-id=7", "--rdzv-backend=c10d", "--rdzv-endpoint=n0"]
    )
    assert str(fixed.settings.rdzv_endpoint) == "n0:29400"
    elastic = shell.load(
        ["--nnodes=1:4", "--nproc_per_node=gpu", "--rdzv_id=job", "--rdzv_endpoint=n0:29500"]
    )
    assert (elastic.settings.nnodes.least, elastic.settings.nnodes.most) == (1, 4)
    assert not elastic.settings.standalone


@given(st.one_of(st.integers(0, 3), st.dictionaries(st.integers(0, 9), st.integers(0, 3), min_size=1)))
def test_redirects_mean_what_they_mean_to_torch(setting: int | dict[int, int]) -> None:
    text = str(setting) if isinstance(setting, int) else ",".join(f"{k}:{v}" for k, v in setting.items())
    ours = value_types.STREAMS.parse(text)
    assert {slot: Std(ours.of(slot)) for slot in range(10)} == to_map(Std.from_str(text), 10)
