"""Every setting, once: its name, type, default, what it means, and how it is given.

``Settings`` is what the agent works with. Each field carries its ``Spec``, from which the command line, the
variables, the settings file, ``--help`` and ``docs/settings.md`` are made.
"""

# ruff: noqa: RUF009 - _setting returns a dataclass field, which is what a default may be

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from elastic_agent.config import kinds
from elastic_agent.config.directories import default_log_dir, default_state_dir
from elastic_agent.config.kinds import Kind
from elastic_agent.config.values import NodeRange, StreamChoice
from elastic_agent.values import Endpoint, PortRange

WORLD = "World: who takes part"
MEETING = "Rendezvous: where the agents meet and how long they wait"
TROUBLE = "Failures: leases, restarts, stopping"
NOTICES = "Notices: being stopped in good order, and growth"
WORKERS = "Workers: how the script is started"
OUTPUT = "Output of the workers"
AGENT = "The agent itself"
GROUPS = (WORLD, MEETING, TROUBLE, NOTICES, WORKERS, OUTPUT, AGENT)


@dataclass(frozen=True)
class Spec:
    """What is known of one setting besides its type.

    Attributes:
        name: the field's name; the flag is ``--`` and the name with dashes, the file's key is the name.
        kind: how its text is read.
        default: its default as text, or None when it has none.
        group: the heading it stands under.
        help: what it does, in a sentence or two.
        torchrun: torchrun has this option too, so its ``PET_`` variable counts.
        short: the one-letter flag, or an empty string.
        why: why our default is not torchrun's; empty when it is, or when torchrun has no such option.
        no_effect: why it is understood but does nothing here; empty for the others.
        variable: its ``ELASTIC_AGENT_`` variable.
        other_variables: more variables that are read after those, in this order.
        shown_default: the default in words where the text alone would not explain it.
        abbreviated: the flag may be shortened. Not one whose short form looks as if a secret followed it.
    """

    name: str
    kind: Kind
    default: str | None
    group: str
    help: str
    torchrun: bool
    short: str
    why: str
    no_effect: str
    variable: str
    other_variables: tuple[str, ...]
    shown_default: str
    abbreviated: bool

    @property
    def flag(self) -> str:
        """The flag with dashes, e.g. ``--rdzv-endpoint``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that set it, first one first."""
        pet = (f"PET_{self.name.upper()}",) if self.torchrun else ()
        return (self.variable, *pet, *self.other_variables)


def _setting(
    kind: Kind,
    default: str | None,
    group: str,
    help: str,  # noqa: A002 - the same word as argparse's
    *,
    torchrun: bool = False,
    short: str = "",
    why: str = "",
    no_effect: str = "",
    variable: str = "",
    other_variables: tuple[str, ...] = (),
    shown_default: str = "",
    abbreviated: bool = True,
    value: Any = None,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A field of ``Settings``. ``value`` is the default's value where it has no text (an empty list)."""

    def spec(name: str) -> Spec:
        shown = shown_default or (default if default is not None else "not set")
        own = variable or f"ELASTIC_AGENT_{name.upper()}"
        return Spec(
            name=name,
            kind=kind,
            default=default,
            group=group,
            help=help,
            torchrun=torchrun,
            short=short,
            why=why,
            no_effect=no_effect,
            variable=own,
            other_variables=other_variables,
            shown_default=shown,
            abbreviated=abbreviated,
        )

    metadata = {"spec": spec}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=value if default is None else kind.parse(default), metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings in force. Times are seconds; paths are absolute; None means "not set"."""

    script: str = ""
    """The script, module (``module``) or program (``no_python``) that the workers run."""

    script_args: tuple[str, ...] = ()
    """Its arguments, untouched."""

    nnodes: NodeRange = _setting(
        kinds.NODES,
        "1",
        WORLD,
        "How many nodes take part: a number, or the least and the most.",
        torchrun=True,
    )
    nproc_per_node: str = _setting(
        kinds.SLOTS,
        "gpu-or-1",
        WORLD,
        "Workers on this node: a number, or gpu, xpu, cpu (one for each that this machine has), auto (its "
        "accelerators, else its CPUs), gpu-or-1 (its GPUs, 1 without any). It may differ from node to node.",
        torchrun=True,
        why="torchrun starts 1 worker, which leaves every GPU but one idle",
    )
    node_id: str | None = _setting(
        kinds.NAME,
        None,
        WORLD,
        "This node's name in the run, the same again after a restart.",
        variable="ELASTIC_AGENT_SET_NODE_ID",
        shown_default="derived from the machine and kept in the state directory",
    )
    node_rank: int | None = _setting(
        kinds.whole_number(0),
        None,
        WORLD,
        "The place this node would like in the order of nodes; without it the order is that of the names.",
        torchrun=True,
        why="torchrun says 0 on every node that is not told otherwise",
    )
    role: str = _setting(
        kinds.TEXT, "default", WORLD, "Name of the workers' role, as the workers see it.", torchrun=True
    )
    local_addr: str | None = _setting(
        kinds.HOST,
        None,
        WORLD,
        "The address under which the other nodes reach this one.",
        torchrun=True,
        shown_default="the address this machine uses to reach the endpoint",
    )

    rdzv_endpoint: Endpoint | None = _setting(
        kinds.ENDPOINT,
        None,
        MEETING,
        "Where the agents meet, the same on every node: the name or address of the machine that holds the "
        "store, and a port, 29400 if none is given. For etcd: its members, separated by commas, port 2379 if "
        "none is given.",
        torchrun=True,
        shown_default="none; needed for more than one node",
    )
    rdzv_backend: str = _setting(
        kinds.BACKEND,
        "c10d",
        MEETING,
        "What holds the agreement: c10d (nothing to install) or etcd (version 3; survives the loss of any "
        "machine; needs --rdzv-id). static is understood as c10d at the same endpoint.",
        torchrun=True,
        why="torchrun's static cannot lose or gain a node",
    )
    rdzv_id: str | None = _setting(
        kinds.NAME,
        None,
        MEETING,
        "The run's id. Give one where several runs share an endpoint.",
        torchrun=True,
        shown_default="agreed by the agents",
        why='torchrun calls every run "none", so runs that share an endpoint mix',
    )
    rdzv_conf: str | None = _setting(
        kinds.CONF,
        None,
        MEETING,
        "More settings as KEY=VALUE,...: join_timeout, settle, start_timeout, lease_ttl, fence_margin, "
        "port_range, etcd_prefix; torch's timeout (join_timeout), last_call_timeout (settle), and its names for "
        "etcd's certificates.",
        torchrun=True,
    )
    standalone: bool = _setting(
        kinds.SWITCH,
        "false",
        MEETING,
        "One node, no endpoint: the agent meets nobody.",
        torchrun=True,
        shown_default="true when no endpoint is given and --nnodes is 1, else false",
        why="torchrun needs to be told",
    )
    master_addr: str | None = _setting(
        kinds.HOST,
        None,
        MEETING,
        "The host of the endpoint where --rdzv-endpoint is not given (torchrun's static rendezvous).",
        torchrun=True,
        shown_default="127.0.0.1 when --master-port is given",
    )
    master_port: int | None = _setting(
        kinds.PORT,
        None,
        MEETING,
        "The port that goes with --master-addr.",
        torchrun=True,
        shown_default="29500 when --master-addr is given",
    )
    etcd_prefix: str = _setting(
        kinds.KEY_PREFIX, "/elastic-agent", MEETING, "Under which keys everything lies in etcd."
    )
    etcd_ca: Path | None = _setting(
        kinds.PATH,
        None,
        MEETING,
        "The certificates to trust (PEM). With this or --etcd-cert, connections to etcd are encrypted.",
    )
    etcd_cert: Path | None = _setting(
        kinds.PATH, None, MEETING, "This agent's own certificate for etcd (PEM), where etcd asks for one."
    )
    etcd_key: Path | None = _setting(kinds.PATH, None, MEETING, "The key of --etcd-cert (PEM).")
    etcd_user: str | None = _setting(
        kinds.TEXT,
        None,
        MEETING,
        "The user to log in to etcd as. Its password is in --etcd-password-file, or in the variable "
        "ELASTIC_AGENT_ETCD_PASSWORD, which workers do not inherit.",
    )
    etcd_password_file: Path | None = _setting(
        kinds.PATH,
        None,
        MEETING,
        "A file that holds the password of --etcd-user and nothing else.",
        abbreviated=False,  # --etcd-password SECRET is a mistake, not a file's name
    )
    port_range: PortRange | None = _setting(
        kinds.PORT_RANGE,
        None,
        MEETING,
        "The ports on which this node may offer the store where the workers meet (for firewalls).",
        shown_default="any free port",
    )
    settle: float = _setting(
        kinds.seconds(0),
        "1.0",
        MEETING,
        "Once there are enough nodes, how long after the last arrival others are awaited.",
    )
    join_timeout: float = _setting(
        kinds.seconds(0, above=True), "600", MEETING, "How long to wait for the least number of nodes."
    )
    start_timeout: float = _setting(
        kinds.seconds(0, above=True),
        "30",
        MEETING,
        "How long the nodes of an agreed world may take to start their workers before a new one is formed.",
    )

    max_restarts: int = _setting(
        kinds.whole_number(0),
        "3",
        TROUBLE,
        "How many failures of workers the run survives, all nodes together, until some are forgiven "
        "(--restart-window). Nodes that come, leave or are lost are free.",
        torchrun=True,
        why="torchrun's 0 ends the run at the first failure",
    )
    restart_window: float = _setting(
        kinds.seconds(0),
        "3600",
        TROUBLE,
        "For each so long that training makes progress, one failure is forgiven: it does not count towards "
        "--max-restarts any more. 0: failures are never forgiven.",
    )
    restart_backoff: float = _setting(
        kinds.seconds(0),
        "60",
        TROUBLE,
        "When failures follow each other without progress, the second restart pauses for 1 s and each later one twice "
        "as long as the one before, up to this. 0: no pause.",
    )
    lease_ttl: float = _setting(
        kinds.seconds(0.5, most=3600),
        "5.0",
        TROUBLE,
        "A node that is silent for this long is lost, and its own guard has killed its workers by then.",
    )
    fence_margin: float = _setting(
        kinds.seconds(0, above=True),
        "1.0",
        TROUBLE,
        "How much longer the others wait before they go on without a lost node: time to kill its workers.",
    )
    restart_grace: float = _setting(
        kinds.seconds(0),
        "1.0",
        TROUBLE,
        "Before a restart: how long workers have between SIGTERM and SIGKILL.",
    )
    shutdown_timeout: float = _setting(
        kinds.seconds(0),
        "30",
        TROUBLE,
        "When this node leaves or the run ends early: how long workers have between SIGTERM and SIGKILL.",
        torchrun=True,
        other_variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    )
    hang_timeout: float = _setting(
        kinds.seconds(0),
        "1800",
        TROUBLE,
        "A worker that has called client.heartbeat and then makes no progress for this long has failed; "
        "0 turns this off. Workers that never call it are not judged.",
    )
    signals_to_handle: tuple[str, ...] = _setting(
        kinds.SIGNALS,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        TROUBLE,
        "The signals that make the agent stop its workers and leave. Where this is not set, one that is ignored when "
        "the agent is started, as by nohup, stays ignored.",
        torchrun=True,
    )
    monitor_interval: float = _setting(
        kinds.seconds(0),
        "0.1",
        TROUBLE,
        "torchrun's pause between two looks at its workers.",
        torchrun=True,
        no_effect="the agent is woken by a worker's exit and does not poll",
    )

    notice_signal: str = _setting(
        kinds.SIGNAL,
        "SIGUSR1",
        NOTICES,
        "The signal, to any one agent, that makes the whole run save and end: its workers are given a notice and "
        "--notice-time. (The signals of --signals-to-handle make one node leave.)",
    )
    notice_time: float = _setting(
        kinds.seconds(0),
        "60",
        NOTICES,
        "After the notice signal, and before a running world grows: how long workers have to save and leave before "
        "they are stopped.",
        shown_default="60; in a Slurm job that ends within an hour, until shortly before its end",
    )
    grow: str = _setting(
        kinds.choice(("never", "at-notice", "after"), metavar="WHEN"),
        "after",
        NOTICES,
        "When nodes that come late are let into a running world: never (only when it re-forms for another reason), "
        "at-notice (when its training looks at client.notice, so that it loses no step), after (then too, and "
        "otherwise by a restart after --grow-delay). A node that had a seat before may always come back.",
    )
    grow_delay: float = _setting(
        kinds.seconds(0),
        "1.0",
        NOTICES,
        "How long after the last arrival a world grows whose training does not look at notices; never less than "
        "--settle.",
    )
    node_unit: tuple[int, ...] = _setting(
        kinds.NODE_COUNTS,
        None,
        NOTICES,
        "How many nodes a world may have: a number of which it is a multiple, or a list of allowed numbers. Nodes "
        "that are left over stand by.",
        shown_default="any number within --nnodes",
        value=(),
    )
    finish_once: bool = _setting(
        kinds.SWITCH,
        "false",
        NOTICES,
        "A run that has finished is not run again under the same id: its agents end at once with success.",
        shown_default="true in a Slurm job, else false",
    )
    requeue: str = _setting(
        kinds.choice(("auto", "never"), metavar="WHEN"),
        "auto",
        NOTICES,
        "What becomes of the job when it was stopped with its state saved, because its time runs out or another "
        "job takes its place. auto: one agent puts it back into the queue, in a Slurm job or with "
        "--requeue-command. never: somebody else does.",
    )
    requeue_command: str | None = _setting(
        kinds.COMMAND,
        None,
        NOTICES,
        "What to run for that, on one node, in a shell with the agent's environment; it fails if its exit code is not "
        "0. Works outside Slurm too.",
        shown_default="in a Slurm job: scontrol requeue and the job's id",
    )
    max_requeues: int = _setting(
        kinds.whole_number(0),
        "100",
        NOTICES,
        "How often a Slurm job may be requeued in all, by whomever (Slurm counts in SLURM_RESTART_COUNT).",
    )

    module: bool = _setting(
        kinds.SWITCH,
        "false",
        WORKERS,
        "The script is a module's name, as for python -m.",
        torchrun=True,
        short="-m",
    )
    no_python: bool = _setting(
        kinds.SWITCH,
        "false",
        WORKERS,
        "The script is a program of its own, not started with Python.",
        torchrun=True,
    )
    run_path: bool = _setting(
        kinds.SWITCH,
        "false",
        WORKERS,
        "Run the script through runpy.run_path. Goes before --no-python and --module.",
        torchrun=True,
    )
    python_exec: str | None = _setting(
        kinds.PROGRAM,
        None,
        WORKERS,
        "The Python that runs the script.",
        other_variables=("PYTHON_EXEC",),
        shown_default="the one that runs the agent",
    )
    worker_start: str = _setting(
        kinds.choice(("warm", "cold"), metavar="HOW"),
        "warm",
        WORKERS,
        "warm: fork workers from a process that has imported torch, in milliseconds. cold: start Python anew for "
        "each. What cannot be started warm (another program or Python) is started cold.",
    )
    preload: tuple[str, ...] = _setting(
        kinds.MODULES,
        None,
        WORKERS,
        "Modules that warm workers have imported before they start, besides torch, separated by commas; e.g. "
        "lightning,torch._dynamo,mymodel.",
        shown_default="none",
        value=(),
    )
    virtual_local_rank: bool = _setting(
        kinds.SWITCH,
        "false",
        WORKERS,
        "Every worker sees LOCAL_RANK 0 and only its own GPU, as device 0.",
        torchrun=True,
    )
    numa_binding: str | None = _setting(
        kinds.choice(("node", "socket", "exclusive", "core-complex"), metavar="MODE"),
        None,
        WORKERS,
        "Bind each worker to the CPUs near its GPU.",
        torchrun=True,
    )
    start_method: str = _setting(
        kinds.choice(("spawn", "fork", "forkserver"), metavar="METHOD"),
        "spawn",
        WORKERS,
        "torchrun's way of creating processes for Python functions.",
        torchrun=True,
        no_effect="every worker runs a script in a fresh process",
    )

    redirects: StreamChoice = _setting(
        kinds.STREAMS,
        "0",
        OUTPUT,
        "Which output goes to files in the log directory instead of the console: 1 stdout, 2 stderr, 3 both, "
        "or by local rank, e.g. 0:3,11:1.",
        torchrun=True,
        short="-r",
    )
    tee: StreamChoice = _setting(
        kinds.STREAMS,
        "0",
        OUTPUT,
        "Which output goes to files and to the console; values as for --redirects.",
        torchrun=True,
        short="-t",
    )
    local_ranks_filter: tuple[int, ...] = _setting(
        kinds.RANKS,
        None,
        OUTPUT,
        "Show the console output of these local ranks only; files are not affected.",
        torchrun=True,
        shown_default="all",
        value=(),
    )
    duplicate_stdout_filters: tuple[str, ...] = _setting(
        kinds.FILTERS,
        None,
        OUTPUT,
        "Copy the stdout lines that contain one of these texts to one more file.",
        torchrun=True,
        shown_default="none",
        value=(),
    )
    duplicate_stderr_filters: tuple[str, ...] = _setting(
        kinds.FILTERS,
        None,
        OUTPUT,
        "The same for stderr.",
        torchrun=True,
        shown_default="none",
        value=(),
    )
    log_dir: Path = _setting(
        kinds.PATH,
        None,
        OUTPUT,
        "Where the workers' output goes, in one folder for each generation.",
        torchrun=True,
        shown_default="logs in the state directory",
        why="torchrun uses a new temporary folder each time",
        factory=lambda: default_log_dir(default_state_dir(os.environ)),
    )
    keep_generations: int = _setting(
        kinds.whole_number(1),
        "20",
        OUTPUT,
        "How many generations' output folders to keep of a run, and as many again of nodes that have left it.",
    )
    keep_runs: int = _setting(
        kinds.whole_number(1),
        "200",
        OUTPUT,
        "How many output folders to keep of runs without --rdzv-id, in the default log directory. Those of "
        "named runs, and those in a directory that was named, are never removed.",
    )
    log_limit: int = _setting(
        kinds.SIZE,
        "1G",
        OUTPUT,
        "How much of each worker's stdout or stderr file to keep: the first third and the last; 0: everything.",
    )
    logs_specs: str | None = _setting(
        kinds.TEXT,
        None,
        OUTPUT,
        "Name of a torchrun.logs_specs entry point that decides where output goes.",
        torchrun=True,
        shown_default="elastic-agent's own, a folder for each generation",
    )
    log_line_prefix_template: str | None = _setting(
        kinds.TEXT,
        None,
        OUTPUT,
        "What stands before each line of workers' output on the console, e.g. [${role_name}${rank}]:",
        other_variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
        shown_default="torch's own",
    )

    config: Path | None = _setting(
        kinds.PATH, None, AGENT, "A TOML file that sets any of these by name, e.g. lease_ttl = 3.0."
    )
    state_dir: Path = _setting(
        kinds.PATH,
        None,
        AGENT,
        "What must survive a restart of this machine: the node's id and the newest generation.",
        shown_default="$XDG_STATE_HOME/elastic-agent, else ~/.local/state/elastic-agent, else a temporary "
        "folder that only this user can write; under systemd its StateDirectory",
        factory=lambda: default_state_dir(os.environ),
    )
    log_format: str = _setting(
        kinds.choice(("auto", "console", "json"), metavar="FORMAT"),
        "auto",
        AGENT,
        "The agent's log: console (readable), json (lines), auto (console on a terminal, entries with fields in "
        "systemd's journal, json elsewhere).",
    )
    log_level: str = _setting(
        kinds.choice(("debug", "info", "warning", "error"), metavar="LEVEL"),
        "info",
        AGENT,
        "The least level that is logged.",
    )
    event_journal: Path | None = _setting(
        kinds.PATH, None, AGENT, "Write every event to this file too, one JSON object a line."
    )
    event_log_handler: str = _setting(
        kinds.TEXT,
        "null",
        AGENT,
        "torchrun's name of a handler for its events.",
        torchrun=True,
        no_effect="events go to the log and to --event-journal",
    )


@cache
def specs() -> tuple[Spec, ...]:
    """Every setting, in the order of the help. The script and its arguments are not among them."""
    return tuple(f.metadata["spec"](f.name) for f in fields(Settings) if "spec" in f.metadata)


@cache
def spec_by_name() -> dict[str, Spec]:
    """The specs by field name."""
    return {spec.name: spec for spec in specs()}
