"""``elastic-agent --hosts``: starts the agents of several machines over ssh, shows their output, and stops them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import Resolved
from elastic_agent.config.settings import spec_by_name
from elastic_agent.config.sources import Layer
from elastic_agent.config.sources.command_line import CommandLine, parse_command_line
from elastic_agent.config.value_types import Host
from elastic_agent.exit_codes import ExitCode
from elastic_agent.launcher.on_host import Order
from elastic_agent.printable import escaped
from elastic_agent.worker_variables import LAUNCH_FOLDER

SSH = (
    *("ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes", "--"),
)
MAIN = "import os; from elastic_agent.launcher.on_host import main; os._exit(main())"
COMMAND = shlex.join(["exec", sys.executable, "-P", "-c", MAIN])
SSH_FAILED = 255
SETTLE = "20"
"""For how long a host that is slow to start may still come into the first world; once all are there, none waits."""
ANSWER_S = 60  # a disk or a login file may never answer
TRAVELLING = re.compile(r"(ELASTIC_AGENT|PET|NCCL|GLOO|OMP|MKL|HF|TRANSFORMERS|WANDB)_|TORCH|PYTHON")


def options_of(line: CommandLine, resolved: Resolved, run_id: str) -> list[str]:
    """Return the options of all agents: those of this command line, and what this machine decides for all."""
    known, decided = spec_by_name(), ("nnodes", "rdzv_endpoint")
    values = {name: given.text for name, given in line.given.items()}
    results = {name: getattr(resolved.settings, name) for name in decided}
    values |= {name: known[name].kind.show(value) for name, value in results.items() if value is not None}
    values |= {"hosts": "", "rdzv_id": run_id}
    if resolved.sources["settle"].layer is Layer.DEFAULT:
        values["settle"] = SETTLE
    return [known[name].flag + ("" if known[name].kind.is_switch else f"={values[name]}") for name in values]


class Connection:
    """One host, and the ssh that leads there."""

    def __init__(self, host: Host) -> None:
        self.host, pipe = host, subprocess.PIPE
        words = [*SSH, host.target, COMMAND]
        # In a session of its own: a terminal's Ctrl-C and end are not meant for it.
        self.process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.lines = self.process.stdout or ()

    def send(self, line: bytes) -> None:
        """Send a line, if the connection stands."""
        with contextlib.suppress(OSError):
            os.write(self.process.stdin.fileno() if self.process.stdin else -1, line + b"\n")

    def examine(self, order: Order) -> str:
        """Return what is wrong on the host, with a remedy; empty: the agent can start."""
        self.send(msgspec.json.encode(order))
        said, name = "no output", self.host.name
        late = threading.Timer(ANSWER_S, os.killpg, (self.process.pid, signal.SIGKILL))
        late.start()
        try:
            for line in (escaped(line.decode(errors="replace").strip()) for line in self.lines):
                if line.startswith(order.token):  # login files may print other lines
                    problem = line.removeprefix(order.token)
                    return problem and f"{name}: {problem}"
                said = line or said
            code = self.process.wait()
        finally:
            late.cancel()
        if code == -signal.SIGKILL:
            return f"{name} has not answered within {ANSWER_S} s: {said}; see whether its disks and login files answer"
        if code == SSH_FAILED:
            return f"{name} cannot be reached: {said}; try: ssh -o BatchMode=yes {self.host.target} true"
        return f"{name} cannot run {sys.executable}: {said}; expected elastic-agent there, as here"


class Terminal:
    """The run as this terminal sees it: its hosts, their output, and what Ctrl-C does."""

    def __init__(self, argv: Sequence[str], resolved: Resolved) -> None:
        self._settings, line = resolved.settings, parse_command_line(argv)
        run_id = self._settings.rdzv_id or f"run-{secrets.token_hex(4)}"
        script = [] if line.script is None else [line.script, *line.script_args]
        variables = {name: text for name, text in os.environ.items() if TRAVELLING.match(name)}
        options, token = options_of(line, resolved, run_id), secrets.token_hex(16)
        self._order = Order(token, os.getcwd(), options, script, variables, run_id)
        self._first_hosts_store = resolved.sources["rdzv_endpoint"] == resolved.sources["hosts"]
        self._connections: list[Connection] = []
        self._interrupts = 2  # until agents are started, any signal ends this command
        self._code: int = ExitCode.NO_STORE

    def run(self) -> int:
        """Start the agents, and show what they say. Returns the exit code of the one that ended last."""
        if shutil.which(SSH[0]) is None:
            raise UsageError("ssh was not found on the PATH", "--hosts needs the OpenSSH client")
        if LAUNCH_FOLDER in os.environ:
            raise UsageError("hosts: not for elastic_agent.launch", "run the program on every machine")
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda signum, frame: self._signalled(signum))
        nodes = self._settings.nnodes
        self._connections += map(Connection, self._settings.hosts)
        with ThreadPoolExecutor(len(self._connections)) as threads:
            problems = [*threads.map(lambda there: there.examine(self._order), self._connections)]
            for problem in filter(None, problems):
                _say(problem)
            ready = [there for there, problem in zip(self._connections, problems, strict=True) if not problem]
            if len(ready) < nodes.least or (problems[0] and self._first_hosts_store):
                wanted = f"{nodes.least} (--nnodes), with {self._settings.rdzv_endpoint} for the store"
                _say(f"nothing started: {len(ready)} of {len(problems)} hosts can be used; expected {wanted}")
                self._leave(ExitCode.TOO_FEW_NODES)
            self._interrupts = 0
            for rank, there in enumerate(self._connections):
                own = [f"--nproc-per-node={there.host.workers}"] if there.host.workers else []
                there.send(msgspec.json.encode([f"--node-rank={rank}", *own]))
            names = ", ".join(there.host.name for there in ready)
            _say(f"run {self._order.run_id} on {names}: it outlives this terminal; Ctrl-C stops it")
            [*threads.map(self._follow, ready)]
        code = ExitCode.INTERRUPTED if self._interrupts > 1 else self._code
        if code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
            run_id = self._order.run_id
            _say(f"to resume the run on all hosts, give the same command here again, with --rdzv-id {run_id}")
        return code

    def _follow(self, there: Connection) -> None:
        name = there.host.name
        for line in there.lines:
            try:
                sys.stdout.buffer.write(b"%s: %s\n" % (name.encode(), line.rstrip(b"\n")))
                sys.stdout.buffer.flush()
            except OSError as error:  # as when the terminal is closed
                _say(f"cannot write the output: {error.strerror}; the run goes on")
                self._leave(128 + signal.SIGPIPE)
        code = there.process.wait()
        if code != SSH_FAILED:
            self._code = code
        elif self._interrupts < 2:
            _say(f"the connection to {name} was lost; the run goes on, as elastic-agent status there shows")

    def _signalled(self, signum: int) -> None:
        self._interrupts += 1
        if signum == signal.SIGHUP or self._interrupts > 2:
            self._leave(128 + signum)
        stops = self._interrupts == 1
        for there in self._connections:
            there.send(b"stop" if stops else b"kill")
        _say("stopping the run; Ctrl-C again kills its workers" if stops else "killing the workers")

    def _leave(self, code: int) -> None:
        for there in self._connections:
            there.process.terminate()
        os._exit(code)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # not print, which a signal must not interrupt to print itself
        os.write(sys.stderr.fileno(), f"elastic-agent: {line}\n".encode())
