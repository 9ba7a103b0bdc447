"""The examination of a machine by itself."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_agent.agent import preflight
from elastic_agent.agent.preflight import Finding, check_endpoint, error, other_addresses, warning
from elastic_agent.cli.doctor import doctor
from elastic_agent.config.errors import UsageError
from elastic_agent.diagnosis.differences import start_facts
from elastic_agent.doctor import interpreter, machine
from elastic_agent.doctor.folders import Shared
from elastic_agent.doctor.gpus import check_gpus, find_gpus
from elastic_agent.doctor.interpreter import Installed, find_installed
from elastic_agent.doctor.local import check_source
from elastic_agent.doctor.machine import (
    LEAST_SHM,
    check_folders,
    check_interfaces,
    check_limits,
    check_shared_memory,
)
from elastic_agent.doctor.records import Local
from elastic_agent.doctor.report import as_text, grouped, report_alone
from elastic_agent.transport import UnreachableError
from elastic_agent.values import Endpoint
from tests.cli.support import elastic_agent
from tests.ports import free_port
from tests.waiting import GUARD_S, wait_for


def checks(found: Any) -> list[tuple[str, str]]:
    return [("error" if finding.is_error else "warning", finding.check) for finding in found]


# -- script ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos.environ['MASTER_ADDR'] = '127.0.0.1'\n", [("error", "script-master-address")]),
        ("import os\nif 'MASTER_ADDR' not in os.environ:\n    os.environ['MASTER_ADDR'] = 'localhost'\n", []),
        ("import os\nos.environ['MASTER_PORT'] = str(1)\n", [("warning", "script-master-address")]),
        ("import os\nos.environ.update(MASTER_ADDR='::1')\n", [("error", "script-master-address")]),
        ("import os\nos.environ.setdefault('MASTER_ADDR', 'localhost')\n", []),
        ("def f(:\n", [("error", "script")]),
        ("os" + ".deep" * 2000 + "['MASTER_ADDR'] = 'localhost'\n", []),
    ],
)
def test_what_a_script_should_leave_to_the_agent(source: str, expected: list[tuple[str, str]]) -> None:
    assert checks(check_source(source.encode(), "train.py")) == expected


# -- interpreter ----------------------------------------------------------------------------------


def installed_for(python: str) -> Installed:
    return asyncio.run(find_installed(python))


@pytest.fixture(autouse=True)
def _machine_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "START_S", GUARD_S)


def test_an_interpreter_is_usable_in_a_folder_whose_files_have_names_of_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("types", "json", "os", "platform", "importlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)
    installed = installed_for(sys.executable)
    assert (installed.start_problem, installed.problem) == ("", "")
    assert installed.versions["torch"] == torch.__version__


def test_an_interpreter_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    problem = installed_for(str(tmp_path / "python")).start_problem
    assert problem.startswith(f"cannot start {tmp_path / 'python'} on this node: No such file or directory")
    assert installed_for("/bin/false").start_problem == "'the interpreter' failed with exit code 1: no output"


def test_an_interpreter_that_does_not_answer_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "START_S", 0.5)
    program, started = tmp_path / "python", tmp_path / "started"
    program.write_text(f"#!/bin/sh\nsleep {GUARD_S} &\necho $! > {started}\nwait\n")
    program.chmod(0o755)
    assert installed_for(str(program)).start_problem == "'the interpreter' did not complete within 0.5 s"
    pid = started.read_text().strip() if started.exists() else ""
    if pid:  # on a slow machine, it had started nothing yet
        child = Path("/proc", pid, "cmdline")
        wait_for("what it has started to end", lambda: not child.exists() or not child.read_bytes())


def test_a_torch_that_cannot_be_imported_is_reported_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    installed = installed_for(sys.executable)
    assert installed.problem == "libcudart.so.12: cannot open shared object file"
    assert installed.python == platform.python_version()


# -- environment ----------------------------------------------------------------------------------


def test_passwords_and_bytes_that_are_no_text_stay_out_of_what_is_compared() -> None:
    found = start_facts([], {"http_proxy": "http://me:secret@proxy:1", "NCCL_X": "\udcff", "HOME": "/root"})
    assert found == {"arguments": "", "env.NCCL_X": "?", "env.http_proxy": "http://***@proxy:1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, []),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, [("error", "gloo-interface")]),
        ({"GLOO_SOCKET_IFNAME": "docker0"}, [("error", "gloo-interface")]),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, [("error", "gloo-interface")]),
        ({"GLOO_SOCKET_IFNAME": "^lo"}, [("error", "gloo-interface")]),
        ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, []),
        ({"NCCL_SOCKET_IFNAME": "eth"}, []),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, [("warning", "nccl-interface")]),
    ],
)
def test_interface_variables_name_interfaces_of_this_machine(
    variables: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    assert checks(check_interfaces(variables, ["eth0", "lo"], "eth0", has_gpus=False)) == expected


# -- machine --------------------------------------------------------------------------------------


def test_an_endpoint_on_loopback_or_without_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(host: str) -> list[Any]:
        raise UnreachableError(f"{host} does not resolve")

    monkeypatch.setattr(preflight, "resolve", find_none)
    assert checks(check_endpoint(Endpoint("localhost"))) == [("error", "loopback-endpoint")]
    assert checks(check_endpoint(Endpoint("no-such-host.invalid"))) == [("error", "endpoint-name")]


def test_folders_that_cannot_be_written_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    folders = {"--state-dir": tmp_path / "new/state", "--log-dir": file / "logs"}
    (finding,) = (found for found in check_folders(folders) if found.check == "folder")
    assert "--log-dir" in finding.cause


@pytest.mark.parametrize(
    ("files", "expected"), [(1024, [("warning", "open-files")]), (4096, []), (resource.RLIM_INFINITY, [])]
)
def test_the_number_of_open_files_has_to_suffice_for_all_workers(
    files: int, expected: list[tuple[str, str]]
) -> None:
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    assert checks(check_limits(800, limits.__getitem__)) == expected


def test_a_limit_of_address_space_is_named_and_is_why_torch_cannot_be_imported() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (560 * 10**6,) * 2)"
    command = f"{limited}; from elastic_agent.cli.main import main; main()"
    words = ["doctor", "--alone", "--node-id", "n1"]
    done = subprocess.run(
        [sys.executable, "-c", command, *words], capture_output=True, text=True, check=False
    )
    named = "a process can have only 560 MB of address space"
    assert f"warning  n1: {named}; torch and its threads use more" in done.stdout, done.stdout + done.stderr
    assert "reinstall torch" not in done.stdout
    assert "install it" not in done.stdout


def test_shared_memory_has_to_be_there_and_large_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks(check_shared_memory(str(tmp_path / "missing"))) == [("error", "shared-memory")]
    for total, free, expected in (
        (LEAST_SHM, LEAST_SHM, []),
        (LEAST_SHM // 8, LEAST_SHM // 8, [("warning", "shared-memory")]),
        (LEAST_SHM, LEAST_SHM // 4, [("warning", "shared-memory")]),
    ):
        usage = SimpleNamespace(total=total, free=free)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, usage=usage: usage)
        assert checks(check_shared_memory()) == expected


class Nvml:
    """A driver with two GPUs, one of which is in use."""

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        process = type("Process", (), {"pid": os.getpid(), "usedGpuMemory": 2**33})
        answers = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetName": lambda handle: b"NVIDIA H100",
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [process] if handle == 0 else [],
        }
        return answers[name]


def test_gpus_in_use_and_workers_without_a_gpu_are_reported(tmp_path: Path) -> None:
    driver = tmp_path / "nvidiactl"
    driver.touch()
    gpus = find_gpus(Nvml(), str(driver))
    assert (gpus.described, gpus.driver) == ("2 x NVIDIA H100", "570.1")
    found = list(check_gpus(gpus, 2, "1"))
    assert checks(found) == [("warning", "gpus-in-use"), ("error", "workers-per-gpu")]
    assert f"(pid {os.getpid()})" in found[0].cause
    assert find_gpus(None, str(tmp_path / "none")).described == "none"


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("findings", "code", "said"),
    [
        ((), 0, "no problems found on n1 alone"),
        ((warning("x", "cause", "remedy"),), 0, "1 warning on n1 alone"),
        ((error("x", "cause", "remedy"),), 1, "1 error on n1 alone"),
    ],
    ids=["healthy", "warning", "error"],
)
def test_the_report_on_a_machine_alone(findings: tuple[Finding, ...], code: int, said: str) -> None:
    report = report_alone(Local("n1", 1, 1), findings)
    assert (report.exit_code, as_text(report, "n1").splitlines()[-1]) == (code, said)


def test_the_command_examines_this_machine_alone(tmp_path: Path) -> None:
    """Its findings depend on the machine."""
    script = tmp_path / "train.py"
    script.write_text("import json\n")
    done = elastic_agent("doctor", "--alone", "--node-id", "n1", "--state-dir", str(tmp_path), str(script))
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.endswith(" on n1 alone\n")
    assert done.stderr == ""


def test_the_shared_folders_of_this_machine_alone_are_examined(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    paths = ",".join(str(path) for path in (tmp_path, tmp_path / "missing", file))
    words = ["--alone", "--node-id", "n1", "--state-dir", str(tmp_path), "--paths", paths]
    done = elastic_agent("doctor", *words)
    assert done.returncode == 1, done
    assert re.findall(rf"^error +n1: {tmp_path}/(.*)\. Remedy: check the path", done.stdout, re.M) == [
        "missing does not exist",
        "file is not a directory",
    ]


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ([Shared("/x", "", True, free=2**40)], []),
        ([Shared("/x", "", True, free=2**20)], [("warning", "disk-space")]),
        ([Shared("/x", "", False, free=2**40)], [("warning", "path-read-only")]),
        ([Shared("/x", "does not exist")], [("error", "path")]),
    ],
    ids=["usable", "full", "read-only", "missing"],
)
def test_a_shared_folder_is_there_writable_and_has_space(
    folders: list[Shared], expected: list[tuple[str, str]]
) -> None:
    report = report_alone(Local("n1", 1, 1, shared=tuple(folders)), ())
    assert checks(report.findings) == expected


def test_a_missing_script_and_a_loopback_endpoint_are_found_at_once() -> None:
    endpoint = f"localhost:{free_port()}"
    words = ["--rdzv-endpoint", endpoint, "--nnodes", "2", "--node-id", "n1", "missing.py"]
    done = elastic_agent("doctor", *words)
    out = done.stdout
    assert done.returncode == 1
    assert f"error    n1: the endpoint {endpoint} means a different machine on every machine" in out
    assert 'error    n1: script "missing.py" does not exist' in out
    assert re.search(r"^\d+ errors.* on n1 alone$", out, re.M)


def test_a_machine_that_is_to_host_etcd_needs_it(tmp_path: Path) -> None:
    addresses = [address for address in other_addresses() if ":" not in address]
    if not addresses:
        pytest.skip("this machine has only loopback addresses")
    endpoint = f"{addresses[0]},198.51.100.2,198.51.100.3"
    words = ["--rdzv-endpoint", endpoint, "--nnodes", "3", "--state-dir", str(tmp_path)]
    done = elastic_agent("doctor", *words, variables={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "apt install etcd-server" in done.stdout, done


def test_a_module_that_a_run_would_refuse_is_reported(tmp_path: Path) -> None:
    words = ["--node-id", "n1", "--state-dir", str(tmp_path), "-m", "no_such_module"]
    done = elastic_agent("doctor", "--alone", *words)
    assert done.returncode == 1
    said = (
        'error    n1: module "no_such_module" was not found from .* Remedy: correct that: expected a module '
    )
    assert re.search(f"^{said}", done.stdout, re.M), done.stdout


@pytest.mark.parametrize("wait", ["soon", "0", "-1", "1e9"])
def test_the_time_to_wait_is_a_number_of_seconds(wait: str) -> None:
    with pytest.raises(UsageError, match="expected seconds, more than 0, 86400 at most"):
        doctor([f"--wait={wait}"])


def test_findings_are_one_line() -> None:
    found = [error("x", "two\nlines", "remedy", name) for name in ("a", "b")]
    assert found[0].cause == "two lines"
    assert grouped(found) == [(Finding(True, "x", "two lines", "remedy"), ["a", "b"])]
