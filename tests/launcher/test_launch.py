"""Functions and programs in workers, started from Python."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import elastic_agent
from elastic_agent.exit_codes import ExitCode
from elastic_agent.launcher import LaunchError
from elastic_agent.launcher.agent_process import _full_name
from tests.names import unique

from .functions import fail, rank_and_restarts, sum_of_ranks


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"nproc_per_node": 2, "state_dir": tmp_path / "state", "lease_ttl": 60, "start_timeout": 300}


@pytest.mark.prove
@pytest.mark.parametrize(
    ("function", "args", "values"),
    [(sum_of_ranks, (3.0,), {0: 3.0, 1: 3.0}), (rank_and_restarts, (), {0: (0, 1), 1: (1, 1)})],
    ids=["at once", "of the last attempt"],
)
def test_a_function_returns_a_value_for_each_rank(
    settings: dict[str, Any], function: Callable[..., Any], args: tuple[float, ...], values: dict[int, Any]
) -> None:
    assert elastic_agent.launch(function, *args, **settings) == values


@pytest.mark.prove
def test_a_run_that_has_finished_before_has_no_values_again(settings: dict[str, Any]) -> None:
    settings |= {"rdzv_id": unique("job"), "finish_once": True}
    assert elastic_agent.launch(sum_of_ranks, 3.0, **settings) == {0: 3.0, 1: 3.0}
    with pytest.raises(LaunchError, match="there are no results: the run has already finished") as raised:
        elastic_agent.launch(sum_of_ranks, 3.0, **settings)
    assert raised.value.exit_code == ExitCode.FINISHED


@pytest.mark.parametrize(
    ("how", "exit_code", "message"),
    [
        ("exception", 1, "an error of the test"),
        pytest.param("signal", -9, "Signal 9", marks=pytest.mark.prove),
    ],
)
def test_a_failure_is_raised_as_torch_raises_it(
    settings: dict[str, Any], tmp_path: Path, how: str, exit_code: int, message: str
) -> None:
    settings["log_dir"] = os.fsdecode(bytes(tmp_path) + b"/log\xff")  # a name that is not UTF-8
    with pytest.raises(ChildFailedError) as raised:
        elastic_agent.launch(fail, how, max_restarts=0, **settings)
    assert raised.value.name == "fail"
    rank, failure = raised.value.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode) == (1, 1, exit_code)
    assert message in str(failure.message)
    assert list(raised.value.failures) == [1], "the other worker was stopped"
    (note,) = raised.value.__notes__
    assert note.startswith("elastic-agent: the run failed: worker ")
    assert message in note or "was killed by SIGKILL" in note


@pytest.mark.prove
def test_a_switch_may_be_off_although_the_environment_has_it_on(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    shows_nothing = {"nproc_per_node": 1, "state_dir": settings["state_dir"]}
    assert elastic_agent.launch(sum_of_ranks, 3.0, **shows_nothing, no_python=False) == {0: 0.0}


def test_a_program_returns_none_for_each_rank(settings: dict[str, Any], tmp_path: Path) -> None:
    code = f"import os; open({str(tmp_path)!r} + '/ran.' + os.environ['RANK'], 'w')"
    assert elastic_agent.launch(sys.executable, "-c", code, **settings) == {0: None, 1: None}
    assert (tmp_path / "ran.0").exists()
    assert (tmp_path / "ran.1").exists()


@pytest.mark.prove
def test_a_run_whose_outcome_could_not_be_written_is_an_error(
    settings: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    away = f"import os; os.rename(os.environ['ELASTIC_AGENT_LAUNCH_FOLDER'], {str(tmp_path / 'away')!r})"
    with pytest.raises(LaunchError, match=r"did not write .*/outcome\.json; expected a disk with free space"):
        elastic_agent.launch(sys.executable, "-c", away, **settings | {"nproc_per_node": 1})
    assert "cannot tell elastic_agent.launch how the run ended" in capfd.readouterr().err


@pytest.mark.parametrize(
    "cloudpickle", ["with cloudpickle", pytest.param("without cloudpickle", marks=pytest.mark.prove)]
)
def test_a_program_may_launch_a_function_of_its_own(tmp_path: Path, cloudpickle: str) -> None:
    script = tmp_path / "program.py"
    without = 'sys.modules["cloudpickle"] = None' if cloudpickle.startswith("without") else ""
    script.write_text(
        dedent(f"""
            import os, sys
            {without}
            import elastic_agent

            OFFSET = 10

            def work(factor):
                return OFFSET + factor * int(os.environ["RANK"])

            if __name__ == "__main__":
                settings = dict(nproc_per_node=2, lease_ttl=60, state_dir={str(tmp_path / "state")!r})
                print(elastic_agent.launch(work, 5, **settings))
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("{0: 10, 1: 15}\n"), done.stderr


@pytest.mark.prove
def test_an_interrupt_reaches_the_function_as_an_interrupt(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        dedent(f"""
            import time
            import elastic_agent

            def work():
                try:
                    print("working", flush=True)
                    time.sleep(1000)
                except KeyboardInterrupt:
                    print("saved", flush=True)

            if __name__ == "__main__":
                elastic_agent.launch(work, lease_ttl=60, state_dir={str(tmp_path / "state")!r})
        """)
    )
    restore = "import signal, sys, runpy; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [
        sys.executable,
        "-c",
        f"{restore}; runpy.run_path(sys.argv[1], run_name='__main__')",
        str(script),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "working\n"
        program.send_signal(signal.SIGINT)
        said, errors = program.communicate()
    assert said == "saved\n", errors
    assert errors.endswith("KeyboardInterrupt\n")


def test_mistakes_are_errors(settings: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError, match="got setting 'nodes'; expected one of hosts, nnodes, "):
        elastic_agent.launch(sum_of_ranks, 1.0, nodes=1)
    with pytest.raises(TypeError, match="cannot pickle sum_of_ranks and its arguments"):
        elastic_agent.launch(sum_of_ranks, (letter for letter in "generator"))
    with pytest.raises(LaunchError, match='exited with code 2: --nnodes: got "0"') as raised:
        elastic_agent.launch(sum_of_ranks, 1.0, nnodes=0, **settings)
    assert raised.value.exit_code == 2
    assert "--nnodes" in capfd.readouterr().err


# --- the name by which agents tell the function of one launch from that of another -----------------


def train(rate: float = 0.1) -> float:
    return rate


class Training:
    def __call__(self) -> None:
        return None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: train, "train"),
        (lambda: functools.partial(functools.partial(train), rate=0.2), "train"),
        (Training, "Training"),
    ],
)
def test_a_function_has_the_same_name_at_every_start(
    make: Callable[[], Callable[..., Any]], name: str
) -> None:
    assert _full_name(make()) == _full_name(make()) == f"{__name__}:{name}"
