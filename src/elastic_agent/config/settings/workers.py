"""How the script is started: one group of settings."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_agent.config import value_types
from elastic_agent.config.settings.spec import setting


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """See :class:`elastic_agent.config.settings.Settings`."""

    module: bool = setting(
        value_types.SWITCH,
        "false",
        "The script is a module name, as for python -m.",
        torchrun=True,
        short="-m",
    )
    no_python: bool = setting(
        value_types.SWITCH,
        "false",
        "The script is an executable program; do not start it with Python.",
        torchrun=True,
    )
    run_path: bool = setting(
        value_types.SWITCH,
        "false",
        "Run the script with runpy.run_path. Takes precedence over --no-python and --module.",
        torchrun=True,
    )
    python_exec: str | None = setting(
        value_types.PROGRAM,
        None,
        "Python interpreter that runs the script.",
        other_variables=("PYTHON_EXEC",),
        shown_default="the interpreter of the agent",
    )
    worker_start: str = setting(
        value_types.choice(("warm", "cold"), metavar="HOW"),
        "warm",
        "warm: fork workers from a process that has imported torch, which takes milliseconds. cold: start "
        "a new Python interpreter for each worker. Workers that cannot be started warm (another program or "
        "interpreter) are started cold.",
    )
    preload: tuple[str, ...] = setting(
        value_types.MODULES,
        None,
        "Modules to preload into warm workers, in addition to the well-known packages that the script imports, "
        "separated by commas; e.g. mymodel,mypackage.",
        shown_default="none",
        value=(),
    )
    virtual_local_rank: bool = setting(
        value_types.SWITCH,
        "false",
        "Every worker sees LOCAL_RANK 0 and only its own GPU, as device 0.",
        torchrun=True,
    )
    numa_binding: str | None = setting(
        value_types.choice(("node", "socket", "exclusive", "core-complex"), metavar="MODE"),
        None,
        "Bind each worker to the CPUs near its GPU.",
        torchrun=True,
    )
    start_method: str = setting(
        value_types.choice(("spawn", "fork", "forkserver"), metavar="METHOD"),
        "spawn",
        "torchrun's start method for worker processes of Python functions.",
        torchrun=True,
        no_effect="every worker runs a script in a fresh process",
    )

    @property
    def runs_module(self) -> bool:
        """Whether the script is the name of a module."""
        return self.module and not self.run_path

    @property
    def runs_program(self) -> bool:
        """Whether the script is a program that Python does not start."""
        return self.no_python and not self.run_path
