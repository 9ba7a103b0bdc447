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

from elastic_agent.config import value_types
from elastic_agent.config.directories import default_log_dir, default_state_dir
from elastic_agent.config.value_types import Kind
from elastic_agent.config.values import NodeRange, StreamChoice
from elastic_agent.values import Endpoint, PortRange

WORLD = "World: nodes and workers"
RENDEZVOUS = "Rendezvous: store and time-outs"
TROUBLE = "Failures: leases, restarts, stopping"
NOTICES = "Notices: graceful shutdown, scaling and requeueing"
WORKERS = "Workers: how the script is started"
OUTPUT = "Output of the workers"
AGENT = "The agent itself"
GROUPS = (WORLD, RENDEZVOUS, TROUBLE, NOTICES, WORKERS, OUTPUT, AGENT)


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
        value_types.NODES,
        "1",
        WORLD,
        "Number of nodes, or its minimum and maximum.",
        torchrun=True,
    )
    nproc_per_node: str = _setting(
        value_types.SLOTS,
        "gpu-or-1",
        WORLD,
        "Workers on this node: a number, or gpu, xpu, cpu (one per device of that type), auto (one per "
        "accelerator, else one per CPU), gpu-or-1 (one per GPU, or 1 without GPUs). It may differ between "
        "nodes.",
        torchrun=True,
        why="torchrun starts 1 worker, which leaves every GPU but one idle",
    )
    node_id: str | None = _setting(
        value_types.NAME,
        None,
        WORLD,
        "Name of this node in the run; stable across restarts.",
        variable="ELASTIC_AGENT_SET_NODE_ID",
        shown_default="derived from the machine and kept in the state directory",
    )
    node_rank: int | None = _setting(
        value_types.whole_number(0),
        None,
        WORLD,
        "Preferred position of this node in the order of nodes. Without it, nodes are ordered by name.",
        torchrun=True,
        why="torchrun uses 0 on every node by default",
    )
    role: str = _setting(
        value_types.TEXT,
        "default",
        WORLD,
        "Role name of the workers, as visible to the workers.",
        torchrun=True,
    )
    local_addr: str | None = _setting(
        value_types.HOST,
        None,
        WORLD,
        "Address at which the other nodes reach this one.",
        torchrun=True,
        shown_default="the address this machine uses to reach the endpoint",
    )

    rdzv_endpoint: Endpoint | None = _setting(
        value_types.ENDPOINT,
        None,
        RENDEZVOUS,
        "Rendezvous endpoint, the same on every node: host name or address of the machine that hosts the "
        "store, with a port (default 29400). For etcd: its members, separated by commas (default port "
        "2379).",
        torchrun=True,
        shown_default="none; needed for more than one node",
    )
    rdzv_backend: str = _setting(
        value_types.BACKEND,
        "c10d",
        RENDEZVOUS,
        "Rendezvous backend: c10d (no extra service) or etcd (version 3; survives the loss of any machine; "
        "requires --rdzv-id). static is treated as c10d at the same endpoint.",
        torchrun=True,
        why="torchrun's static cannot lose or gain a node",
    )
    rdzv_id: str | None = _setting(
        value_types.NAME,
        None,
        RENDEZVOUS,
        "Run id. Set it to resume a run later, or to run several jobs at one endpoint.",
        torchrun=True,
        shown_default="generated by the agents",
        why='torchrun uses "none" for every run, so jobs that share an endpoint interfere',
    )
    rdzv_conf: str | None = _setting(
        value_types.CONF,
        None,
        RENDEZVOUS,
        "More settings as KEY=VALUE,...: join_timeout, settle, start_timeout, lease_ttl, fence_margin, "
        "port_range, etcd_prefix; and torch's timeout (join_timeout), last_call_timeout (settle), and its "
        "names for the etcd certificates.",
        torchrun=True,
    )
    standalone: bool = _setting(
        value_types.SWITCH,
        "false",
        RENDEZVOUS,
        "Single-node run without an endpoint.",
        torchrun=True,
        shown_default="true when no endpoint is given and --nnodes is 1, else false",
        why="torchrun requires the option",
    )
    master_addr: str | None = _setting(
        value_types.HOST,
        None,
        RENDEZVOUS,
        "Host of the endpoint if --rdzv-endpoint is not given (torchrun's static rendezvous).",
        torchrun=True,
        shown_default="127.0.0.1 when --master-port is given",
    )
    master_port: int | None = _setting(
        value_types.PORT,
        None,
        RENDEZVOUS,
        "Port that belongs to --master-addr.",
        torchrun=True,
        shown_default="29500 when --master-addr is given",
    )
    etcd_prefix: str = _setting(
        value_types.KEY_PREFIX, "/elastic-agent", RENDEZVOUS, "Prefix of all keys in etcd."
    )
    etcd_ca: Path | None = _setting(
        value_types.PATH,
        None,
        RENDEZVOUS,
        "CA certificates for etcd (PEM). With this or --etcd-cert, connections to etcd use TLS.",
    )
    etcd_cert: Path | None = _setting(
        value_types.PATH, None, RENDEZVOUS, "Client certificate for etcd (PEM); requires --etcd-key."
    )
    etcd_key: Path | None = _setting(value_types.PATH, None, RENDEZVOUS, "Private key of --etcd-cert (PEM).")
    etcd_user: str | None = _setting(
        value_types.TEXT,
        None,
        RENDEZVOUS,
        "etcd user. Its password is read from --etcd-password-file or from the variable "
        "ELASTIC_AGENT_ETCD_PASSWORD, which workers do not inherit.",
    )
    etcd_password_file: Path | None = _setting(
        value_types.PATH,
        None,
        RENDEZVOUS,
        "File that contains only the password of --etcd-user.",
        abbreviated=False,  # --etcd-password SECRET is a mistake, not a file's name
    )
    port_range: PortRange | None = _setting(
        value_types.PORT_RANGE,
        None,
        RENDEZVOUS,
        "Ports that this node may use for bootstrap stores, where workers initialise their process group "
        "(for firewalls).",
        shown_default="any free port",
    )
    settle: float = _setting(
        value_types.seconds(0),
        "1.0",
        RENDEZVOUS,
        "Once there are enough nodes, how long to wait for more after the last one joined.",
    )
    join_timeout: float = _setting(
        value_types.seconds(0, above=True),
        "600",
        RENDEZVOUS,
        "How long to wait for the minimum number of nodes, or for the store.",
    )
    start_timeout: float = _setting(
        value_types.seconds(0, above=True),
        "30",
        RENDEZVOUS,
        "How long a node may take to start its workers in a new generation. Slower nodes are left out of "
        "the next one.",
    )

    max_restarts: int = _setting(
        value_types.whole_number(0),
        "3",
        TROUBLE,
        "Restart budget: number of worker failures that the run survives, on all nodes together. Nodes "
        "that join, leave or fail do not count. Failures are forgiven after progress (--restart-window).",
        torchrun=True,
        why="torchrun's 0 ends the run at the first failure",
    )
    restart_window: float = _setting(
        value_types.seconds(0),
        "3600",
        TROUBLE,
        "Time of training progress after which one failure is forgiven, that is, no longer counts against "
        "--max-restarts. 0: never.",
    )
    restart_backoff: float = _setting(
        value_types.seconds(0),
        "60",
        TROUBLE,
        "Maximum delay between restarts in a crash loop. If failures repeat without progress, the second "
        "restart is delayed by 1 s, and the delay doubles with each further one. 0: no delay.",
    )
    lease_ttl: float = _setting(
        value_types.seconds(0.5, most=3600),
        "5.0",
        TROUBLE,
        "A node that does not renew its lease for this long is considered lost. By then, its guard has "
        "killed its workers.",
    )
    fence_margin: float = _setting(
        value_types.seconds(0, above=True),
        "1.0",
        TROUBLE,
        "How long the other nodes wait after the lease of a lost node has expired, to allow for the time "
        "to kill its workers.",
    )
    restart_grace: float = _setting(
        value_types.seconds(0),
        "1.0",
        TROUBLE,
        "Time between SIGTERM and SIGKILL for workers before a restart.",
    )
    shutdown_timeout: float = _setting(
        value_types.seconds(0),
        "30",
        TROUBLE,
        "Time between SIGTERM and SIGKILL for workers when this node leaves or the run is stopped.",
        torchrun=True,
        other_variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    )
    hang_timeout: float = _setting(
        value_types.seconds(0),
        "1800",
        TROUBLE,
        "A worker that has called client.heartbeat and then does not call it for this long has failed. "
        "Workers that never call it are not monitored. 0: off.",
    )
    signals_to_handle: tuple[str, ...] = _setting(
        value_types.SIGNALS,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        TROUBLE,
        "Signals that make the agent stop its workers and leave the run. By default, signals that are "
        "ignored when the agent starts, for example under nohup, stay ignored.",
        torchrun=True,
    )
    monitor_interval: float = _setting(
        value_types.seconds(0),
        "0.1",
        TROUBLE,
        "torchrun's polling interval for worker exits.",
        torchrun=True,
        no_effect="the agent is woken by a worker's exit and does not poll",
    )

    notice_signal: str = _setting(
        value_types.SIGNAL,
        "SIGUSR1",
        NOTICES,
        "Signal to any agent that stops the whole run gracefully: workers receive a notice and have "
        "--notice-time. (With the signals of --signals-to-handle, only one node leaves.)",
    )
    notice_time: float = _setting(
        value_types.seconds(0),
        "60",
        NOTICES,
        "Time that workers have to save and exit after the notice signal, and before a running world grows.",
        shown_default="60; in a Slurm job that ends within an hour, until shortly before its end",
    )
    grow: str = _setting(
        value_types.choice(("never", "at-notice", "after"), metavar="WHEN"),
        "after",
        NOTICES,
        "When nodes that arrive late may join a running world: never (only when the next generation forms "
        "for another reason), at-notice (if the script handles notices, so that no step is lost), after "
        "(as at-notice, otherwise by a restart after --grow-delay). A node that was part of the run before "
        "may always rejoin.",
    )
    grow_delay: float = _setting(
        value_types.seconds(0),
        "1.0",
        NOTICES,
        "How long a new node waits after the last arrival before a script that does not handle notices is "
        "restarted to include it. At least --settle.",
    )
    node_unit: tuple[int, ...] = _setting(
        value_types.NODE_COUNTS,
        None,
        NOTICES,
        "Allowed numbers of nodes in a world: one number (its multiples are allowed) or a list. Surplus "
        "nodes stand by.",
        shown_default="any number within --nnodes",
        value=(),
    )
    finish_once: bool = _setting(
        value_types.SWITCH,
        "false",
        NOTICES,
        "Do not start a finished run again under the same run id: its agents exit immediately with success.",
        shown_default="true in a Slurm job, else false",
    )
    requeue: str = _setting(
        value_types.choice(("auto", "never"), metavar="WHEN"),
        "auto",
        NOTICES,
        "Whether to requeue a job that was stopped with its state saved, because of its time limit or a "
        "preemption. auto: one agent requeues it, in a Slurm job or with --requeue-command. never: it is "
        "not requeued.",
    )
    requeue_command: str | None = _setting(
        value_types.COMMAND,
        None,
        NOTICES,
        "Shell command that requeues the job, run on one node in the agent's environment. A non-zero exit "
        "code means failure. Also works outside of Slurm.",
        shown_default="in a Slurm job: scontrol requeue and the job's id",
    )
    max_requeues: int = _setting(
        value_types.whole_number(0),
        "100",
        NOTICES,
        "Maximum number of requeues of a Slurm job, including those by others (from SLURM_RESTART_COUNT).",
    )

    module: bool = _setting(
        value_types.SWITCH,
        "false",
        WORKERS,
        "The script is a module name, as for python -m.",
        torchrun=True,
        short="-m",
    )
    no_python: bool = _setting(
        value_types.SWITCH,
        "false",
        WORKERS,
        "The script is an executable program; do not start it with Python.",
        torchrun=True,
    )
    run_path: bool = _setting(
        value_types.SWITCH,
        "false",
        WORKERS,
        "Run the script with runpy.run_path. Takes precedence over --no-python and --module.",
        torchrun=True,
    )
    python_exec: str | None = _setting(
        value_types.PROGRAM,
        None,
        WORKERS,
        "Python interpreter that runs the script.",
        other_variables=("PYTHON_EXEC",),
        shown_default="the interpreter of the agent",
    )
    worker_start: str = _setting(
        value_types.choice(("warm", "cold"), metavar="HOW"),
        "warm",
        WORKERS,
        "warm: fork workers from a process that has imported torch, which takes milliseconds. cold: start "
        "a new Python interpreter for each worker. Workers that cannot be started warm (another program or "
        "interpreter) are started cold.",
    )
    preload: tuple[str, ...] = _setting(
        value_types.MODULES,
        None,
        WORKERS,
        "Modules to preload into warm workers, in addition to torch, separated by commas; e.g. "
        "lightning,torch._dynamo,mymodel.",
        shown_default="none",
        value=(),
    )
    virtual_local_rank: bool = _setting(
        value_types.SWITCH,
        "false",
        WORKERS,
        "Every worker sees LOCAL_RANK 0 and only its own GPU, as device 0.",
        torchrun=True,
    )
    numa_binding: str | None = _setting(
        value_types.choice(("node", "socket", "exclusive", "core-complex"), metavar="MODE"),
        None,
        WORKERS,
        "Bind each worker to the CPUs near its GPU.",
        torchrun=True,
    )
    start_method: str = _setting(
        value_types.choice(("spawn", "fork", "forkserver"), metavar="METHOD"),
        "spawn",
        WORKERS,
        "torchrun's start method for worker processes of Python functions.",
        torchrun=True,
        no_effect="every worker runs a script in a fresh process",
    )

    redirects: StreamChoice = _setting(
        value_types.STREAMS,
        "0",
        OUTPUT,
        "Output to write to files in the log directory instead of the console: 1 stdout, 2 stderr, 3 both; "
        "or per local rank, e.g. 0:3,11:1.",
        torchrun=True,
        short="-r",
    )
    tee: StreamChoice = _setting(
        value_types.STREAMS,
        "0",
        OUTPUT,
        "Output to write to files and to the console; values as for --redirects.",
        torchrun=True,
        short="-t",
    )
    local_ranks_filter: tuple[int, ...] = _setting(
        value_types.RANKS,
        None,
        OUTPUT,
        "Local ranks whose output is shown on the console; files are not affected.",
        torchrun=True,
        shown_default="all",
        value=(),
    )
    duplicate_stdout_filters: tuple[str, ...] = _setting(
        value_types.FILTERS,
        None,
        OUTPUT,
        "Copy stdout lines that contain one of these strings to an additional file.",
        torchrun=True,
        shown_default="none",
        value=(),
    )
    duplicate_stderr_filters: tuple[str, ...] = _setting(
        value_types.FILTERS,
        None,
        OUTPUT,
        "Copy stderr lines that contain one of these strings to an additional file.",
        torchrun=True,
        shown_default="none",
        value=(),
    )
    log_dir: Path = _setting(
        value_types.PATH,
        None,
        OUTPUT,
        "Directory for the output of the workers, with one subdirectory per generation.",
        torchrun=True,
        shown_default="logs in the state directory",
        why="torchrun uses a new temporary directory each time",
        factory=lambda: default_log_dir(default_state_dir(os.environ)),
    )
    keep_generations: int = _setting(
        value_types.whole_number(1),
        "20",
        OUTPUT,
        "Number of generations whose output is kept per run; the same number is kept of nodes that have "
        "left it.",
    )
    keep_runs: int = _setting(
        value_types.whole_number(1),
        "200",
        OUTPUT,
        "Number of runs without --rdzv-id whose output is kept in the default log directory. Output of "
        "runs with --rdzv-id, or in a directory given by --log-dir, is never removed.",
    )
    log_limit: int = _setting(
        value_types.SIZE,
        "1G",
        OUTPUT,
        "Maximum size of each worker's stdout or stderr file. Of larger output, the first third and the "
        "end are kept. 0: no limit.",
    )
    logs_specs: str | None = _setting(
        value_types.TEXT,
        None,
        OUTPUT,
        "Name of a torchrun.logs_specs entry point that decides where output goes.",
        torchrun=True,
        shown_default="elastic-agent's own, a directory per generation",
    )
    log_line_prefix_template: str | None = _setting(
        value_types.TEXT,
        None,
        OUTPUT,
        "Prefix of each line of worker output on the console, e.g. [${role_name}${rank}]:",
        other_variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
        shown_default="torch's default",
    )

    config: Path | None = _setting(
        value_types.PATH, None, AGENT, "TOML file with settings, e.g. lease_ttl = 3.0."
    )
    state_dir: Path = _setting(
        value_types.PATH,
        None,
        AGENT,
        "Directory for state that must survive a restart of this machine: node ids and the history of runs.",
        shown_default="$XDG_STATE_HOME/elastic-agent, else ~/.local/state/elastic-agent, else a temporary "
        "directory that only this user can write; under systemd its StateDirectory",
        factory=lambda: default_state_dir(os.environ),
    )
    log_format: str = _setting(
        value_types.choice(("auto", "console", "json"), metavar="FORMAT"),
        "auto",
        AGENT,
        "Format of the agent's log: console (readable), json (one object per line), auto (console on a "
        "terminal, structured entries in systemd's journal, json elsewhere).",
    )
    log_level: str = _setting(
        value_types.choice(("debug", "info", "warning", "error"), metavar="LEVEL"),
        "info",
        AGENT,
        "Minimum level of log messages.",
    )
    event_journal: Path | None = _setting(
        value_types.PATH, None, AGENT, "Also write every event to this file, as one JSON object per line."
    )
    event_log_handler: str = _setting(
        value_types.TEXT,
        "null",
        AGENT,
        "Name of torchrun's handler for its events.",
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
