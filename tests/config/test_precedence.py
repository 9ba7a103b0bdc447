"""Flags, then the environment, the file, the site, the default; each value knows where it came from."""

from __future__ import annotations

import sys

import pytest

from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import load_settings
from elastic_agent.config.settings import specs
from elastic_agent.config.sources import Layer, Source
from tests.config.support import Shell


def test_each_layer_takes_precedence_over_the_next(shell: Shell) -> None:
    step = {"SLURM_JOB_ID": "40", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1"}

    def load(argv: list[str], variables: dict[str, str]) -> tuple[str | None, str]:
        resolved = shell.load(argv, {**step, **variables})
        return resolved.settings.rdzv_id, str(resolved.sources["rdzv_id"])

    file = shell.write("run.toml", 'rdzv_id = "30"\n')
    config = ["--config", file]
    both = {"PET_RDZV_ID": "21", "ELASTIC_AGENT_RDZV_ID": "20"}
    assert load([*config, "--rdzv-id", "10"], both) == ("10", "--rdzv-id")
    assert load(config, both) == ("20", "ELASTIC_AGENT_RDZV_ID")
    assert load(config, {"PET_RDZV_ID": "21"}) == ("21", "PET_RDZV_ID")
    assert load(config, {}) == ("30", f"{file}: rdzv_id")
    assert load([], {}) == ("slurm-40", "Slurm (the job's id)")
    assert shell.load().settings.rdzv_id is None
    assert str(shell.load().sources["rdzv_id"]) == "default"


def test_rdzv_conf_counts_in_its_own_layer(shell: Shell) -> None:
    variables = {"ELASTIC_AGENT_JOIN_TIMEOUT": "20", "PET_RDZV_CONF": "join_timeout=30"}
    assert (
        shell.load(["--join-timeout", "10", "--rdzv-conf", "timeout=11"], variables).settings.join_timeout
        == 10
    )
    resolved = shell.load(["--rdzv-conf", "timeout=11"], variables)
    assert resolved.settings.join_timeout == 11
    assert str(resolved.sources["join_timeout"]) == "--rdzv-conf: timeout"
    assert shell.load([], variables).settings.join_timeout == 20
    assert shell.load([], {"PET_RDZV_CONF": "join_timeout=30"}).settings.join_timeout == 30


@pytest.mark.parametrize(
    "text", ["'timeout=11,settle=2'", "timeout='11',settle=\"2\"", ' "timeout=11, settle=2" ']
)
def test_quotes_in_rdzv_conf_are_no_part_of_it(shell: Shell, text: str) -> None:
    """Scripts that build the command line as a list pass quotes on, which torchrun accepts."""
    settings = shell.load(["--rdzv-conf", text]).settings
    assert (settings.join_timeout, settings.settle) == (11, 2)


def test_an_empty_variable_is_not_set(shell: Shell) -> None:
    assert str(shell.load([], {"PET_MAX_RESTARTS": ""}).sources["max_restarts"]) == "default"


def test_every_setting_can_come_from_our_variable_and_from_the_file(shell: Shell) -> None:
    samples = {
        "hosts": "lab1,me@lab2:4,[::1]:2",
        "nnodes": "1",
        "rdzv_endpoint": "n0:1",
        "rdzv_backend": "c10d",
        "rdzv_conf": "settle=2",
        "port_range": "5:6",
        "numa_binding": "socket",
        "start_method": "fork",
        "python_exec": sys.executable,
        "worker_start": "cold",
        "preload": "lightning,torch._dynamo",
        "redirects": "3",
        "tee": "0:1",
        "local_ranks_filter": "1",
        "log_format": "json",
        "log_level": "debug",
        "signals_to_handle": "SIGUSR1",
        "notice_signal": "SIGUSR2",
        "grow": "at-notice",
        "node_unit": "1",
        "nproc_per_node": "cpu",
        "lease_ttl": "1.5",
        "log_dir": str(shell.folder / "l"),
        "state_dir": str(shell.folder / "s"),
        "event_journal": str(shell.folder / "e"),
        "local_addr": "n1",
        "master_addr": "n2",
        "etcd_prefix": "/seven",
        "log_limit": "7M",
        "requeue": "never",
        "survive": "keep",
    }
    for spec in specs():
        if spec.name == "config":
            continue
        text = samples.get(spec.name, "true" if spec.kind.is_switch else "7")
        expected = spec.kind.parse(text)
        from_variable = shell.load([], {spec.variable: text})
        assert getattr(from_variable.settings, spec.name) == expected, spec.name
        assert from_variable.sources[spec.name] == Source(Layer.ENVIRONMENT, spec.variable)
        file = shell.write("one.toml", f'{spec.name} = "{text}"\n')
        from_file = shell.load(["--config", file])
        assert getattr(from_file.settings, spec.name) == expected, spec.name
        assert from_file.sources[spec.name].layer is Layer.FILE


def test_the_file_takes_tomls_own_types(shell: Shell) -> None:
    file = shell.write(
        "run.toml",
        """
        nnodes = 1
        lease-ttl = 3
        settle = 0.5
        module = true
        local_ranks_filter = [0, 2]
        signals_to_handle = ["SIGTERM", "SIGUSR2"]
        duplicate_stdout_filters = ["a,b", "c"]
        rdzv_conf = { join_timeout = 77, is_host = true }
        """,
    )
    settings = shell.load([f"--config={file}"]).settings
    assert (settings.lease_ttl, settings.settle, settings.module) == (3.0, 0.5, True)
    assert settings.local_ranks_filter == (0, 2)
    assert settings.signals_to_handle == ("SIGTERM", "SIGUSR2")
    assert settings.duplicate_stdout_filters == ("a,b", "c")
    assert settings.join_timeout == 77.0


def test_the_file_may_name_the_script(shell: Shell) -> None:
    file = shell.write("run.toml", f'script = "{shell.script}"\nscript_args = ["--epochs", "3"]\n')
    resolved = load_settings([], {**shell.environ, "ELASTIC_AGENT_CONFIG": file})
    assert (resolved.settings.script, resolved.settings.script_args) == (shell.script, ("--epochs", "3"))
    other = shell.write("other.py", "")
    resolved = load_settings(["--config", file, other], shell.environ)
    assert (resolved.settings.script, resolved.settings.script_args) == (other, ())


def test_systemds_directories_are_used(shell: Shell) -> None:
    state, logs = shell.folder / "lib/elastic-agent", shell.folder / "log/elastic-agent"
    made = {"STATE_DIRECTORY": f"{state}:{shell.folder}/lib/other", "LOGS_DIRECTORY": str(logs)}
    resolved = shell.load([], made)
    assert resolved.settings.state_dir == state
    assert resolved.settings.log_dir == logs
    assert str(resolved.sources["state_dir"]) == "systemd's STATE_DIRECTORY"
    assert shell.load(["--state-dir", str(shell.folder)], made).settings.state_dir == shell.folder


def test_the_state_directory_without_systemd(shell: Shell) -> None:
    home = shell.folder / ".local/state/elastic-agent"
    assert shell.load().settings.state_dir == home
    assert shell.load().settings.log_dir == home / "logs"
    assert shell.load([], {"XDG_STATE_HOME": str(shell.folder / "x")}).settings.state_dir == (
        shell.folder / "x/elastic-agent"
    )
    assert shell.load([], {"XDG_STATE_HOME": "relative"}).settings.state_dir == home
    assert not home.exists(), "reading the settings makes no folders"


def test_without_a_usable_home_state_goes_to_a_temporary_folder_with_a_warning(shell: Shell) -> None:
    unusable = {"HOME": shell.script, "TMPDIR": str(shell.folder)}  # a file is no home
    resolved = shell.load([], unusable)
    assert resolved.settings.state_dir.parent == shell.folder
    assert [note.level for note in resolved.notes] == ["warning"]
    assert "--state-dir" in resolved.notes[0].text


def test_variables_of_torch_without_an_option_are_read(shell: Shell) -> None:
    settings = shell.load(
        [],
        {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7",
            "PYTHON_EXEC": sys.executable,
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] ",
        },
    ).settings
    assert settings.shutdown_timeout == 7.0
    assert settings.python_exec == sys.executable
    assert settings.log_line_prefix_template == "[${rank}] "


WORKER = {
    "ELASTIC_AGENT_RUN_ID": "outer",
    "ELASTIC_AGENT_NODE_ID": "outer-node",
    "ELASTIC_AGENT_WORKER_ID": "outer-node/0",
    "ELASTIC_AGENT_SLOT": "0",
    "ELASTIC_AGENT_INCARNATION": "abc",
    "ELASTIC_AGENT_GENERATION": "4",
    "ELASTIC_AGENT_RESTARTS": "1",
    "ELASTIC_AGENT_FIRST_GENERATION": "0",
    "ELASTIC_AGENT_HEARTBEAT": "/dev/shm/elastic-agent.0.beat",
    "ELASTIC_AGENT_STACKS_SIGNAL": "36",
}


def test_an_agent_inside_a_worker_takes_no_identity_from_it(shell: Shell) -> None:
    inside, outside = shell.load([], WORKER), shell.load()
    assert inside.settings == outside.settings
    assert inside.notes == ()


def test_no_setting_shares_a_variable_with_workers() -> None:
    assert not {variable for spec in specs() for variable in spec.variables} & set(WORKER)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("ELASTIC_AGENT_NODE_ID", "n1", "ELASTIC_AGENT_SET_NODE_ID"),
        ("ELASTIC_AGENT_LIGHTNING_DISABLE", "resume", ""),
        (
            "ELASTIC_AGENT_MAX_RESTART",
            "9",
            "is not a setting and was ignored; did you mean ELASTIC_AGENT_MAX_RESTARTS?",
        ),
        ("PET_NPROC_PER_NODES", "9", "did you mean PET_NPROC_PER_NODE?"),
        ("PET_CARE", "vet", ""),
        (
            "TORCHELASTIC_ENABLE_FILE_TIMER",
            "1",
            "has no effect: hangs are found without torch's timers, see --hang-timeout",
        ),
        ("TORCHELASTIC_ENABLE_FILE_TIMER", "0", ""),
        ("TORCHELASTIC_HEALTH_CHECK_PORT", "1", "has no effect: use --status-port"),
        ("TORCHELASTIC_HEALTH_CHECK_PORT", "0", ""),
    ],
)
def test_a_variable_without_effect_is_a_warning_that_names_what_to_use(
    shell: Shell, variable: str, value: str, told: str
) -> None:
    notes = shell.load([], {variable: value}).notes
    assert [(note.level, variable in note.text) for note in notes] == [("warning", True)] * bool(told)
    assert all(told in note.text for note in notes)


def test_the_error_names_the_layer_with_the_highest_precedence(shell: Shell) -> None:
    with pytest.raises(UsageError, match=r"^PET_MAX_RESTARTS: "):
        shell.load([], {"PET_MAX_RESTARTS": "many"})
    shell.load(["--max-restarts", "1"], {"PET_MAX_RESTARTS": "many"})


def test_options_of_elastic_agent_behind_the_script_cause_a_warning(shell: Shell) -> None:
    def warnings(*words: str) -> list[str]:
        resolved = load_settings([shell.script, *words], shell.environ)
        return [note.text for note in resolved.notes if note.level == "warning"]

    assert warnings("--nnodes", "2", "--rdzv_id=x", "--epochs", "3") == [
        (
            "--nnodes, --rdzv-id after the script are options of the script, not of elastic-agent; put options of "
            "elastic-agent before the script"
        )
    ]
    assert warnings("--role", "x", "nnodes") == []
