"""The state directory when the home is unusable, and which folders the agent trusts there."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_agent.config.directories import make_state_dir
from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.torchrun import plugin
from tests.cli.support import LONG_LEASE, elastic_agent, refusal, without_overrides
from tests.names import unique
from tests.small_disk import run_on_small_disk

ANOTHER_USER = 61002

Attack = Callable[[Path, Path], None]
"""Prepares the temporary state directory; also gets the victim's home."""


def give_away(folder: Path, home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    folder.mkdir(mode=0o755)
    os.chown(folder, ANOTHER_USER, ANOTHER_USER)


def open_to_all(folder: Path, home: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def link_elsewhere(folder: Path, home: Path) -> None:
    (home / "elsewhere").mkdir()
    folder.symlink_to(home / "elsewhere")


ATTACKS = [
    pytest.param(give_away, f"which belongs to another user ({ANOTHER_USER})", id="of another user"),
    pytest.param(open_to_all, "which is writable by other users", id="open to all"),
    pytest.param(link_elsewhere, "which is not a directory", id="a link"),
]


@pytest.mark.parametrize("option", ["--state-dir", "--log-dir"])
def test_a_folder_that_cannot_be_made_is_named_with_the_option_that_was_given(
    script: Path, tmp_path: Path, option: str
) -> None:
    """The file system says so only when the folder is made."""
    options = {"--state-dir": str(tmp_path / "state"), option: "/proc/none"}
    line = refusal(*(word for given in options.items() for word in given), str(script))
    assert f"{option}" in line
    assert re.search(
        r"cannot create the log directory '/proc/none\S*': .*; expected a writable directory", line
    )
    assert ("--log-dir" in line) == (option == "--log-dir")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The folder of last resort below ``tmp_path/tmp``, not made yet."""
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp" / f"elastic-agent-{os.getuid()}"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('trained')\n")
    return path


def without_a_home(temporary: Path) -> dict[str, str]:
    return {**LONG_LEASE, "HOME": "", "XDG_STATE_HOME": "", "TMPDIR": str(temporary.parent)}


@pytest.mark.parametrize(("attack", "reason"), ATTACKS)
def test_a_temporary_folder_that_another_user_may_have_made_is_refused(
    temporary: Path, script: Path, attack: Attack, reason: str
) -> None:
    """It could hold links in the place of files that the agent writes."""
    home = script.parent / "home"
    home.mkdir()
    precious = home / "precious"
    precious.write_text("mine\n")
    attack(temporary, home)
    run_id = unique("train")
    (temporary / "nodes" / run_id).mkdir(parents=True)
    (temporary / "nodes" / run_id / "n1.lock").symlink_to(precious)
    told = refusal("--rdzv-id", run_id, "--node-id", "n1", str(script), variables=without_a_home(temporary))
    assert precious.read_text() == "mine\n"
    assert f"got {quoted(temporary)}, {reason}; expected a directory that belongs to this user" in told


@pytest.mark.parametrize(("attack", "reason"), ATTACKS)
def test_a_temporary_folder_that_appears_at_the_last_moment_is_refused(
    temporary: Path, tmp_path: Path, attack: Attack, reason: str
) -> None:
    attack(temporary, tmp_path)
    with pytest.raises(UsageError) as caught:
        make_state_dir(temporary, without_a_home(temporary))
    assert reason in str(caught.value)


def test_torchrun_refuses_an_unsafe_temporary_folder_too(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all(temporary, temporary.parent)
    for name, value in without_a_home(temporary).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugin, "log_beside_program", lambda *_: None)
    with pytest.raises(
        ValueError, match="which is writable by other users; expected a directory that belongs to this user"
    ):
        plugin.elastic_handler()(RendezvousParameters("elastic", "127.0.0.1:29400", "train", 1, 1))


def test_the_temporary_folder_is_accessible_to_its_user_only(temporary: Path) -> None:
    before = os.umask(0)
    try:
        for _ in ("made", "used again"):
            make_state_dir(temporary, without_a_home(temporary))
            assert stat.S_IMODE(temporary.lstat().st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.prove
def test_a_symlink_in_place_of_a_lock_is_not_followed(tmp_path: Path, script: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    run_id = unique("train")
    lock = tmp_path / "state" / "nodes" / run_id / "n1.lock"
    lock.parent.mkdir(parents=True)
    lock.symlink_to(precious)
    options = ["--state-dir", str(tmp_path / "state"), "--rdzv-id", run_id, "--node-id", "n1"]
    done = elastic_agent(*options, str(script))
    assert precious.read_text() == "mine\n"
    assert done.returncode == 2
    assert f"is not usable: {lock}: " in done.stderr
    assert "Traceback" not in done.stderr


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 4, 8])
def test_a_full_state_directory_is_named_with_what_to_do(tmp_path: Path, script: Path, left: int) -> None:
    """``left``: kilobytes, for what the agent writes first."""
    state = tmp_path / "state"
    state.mkdir()
    fill = f"head -c {(64 - left) * 1024} /dev/zero > {state}/fill"
    options = ["--state-dir", str(state), "--rdzv-id", unique("train"), "--log-format", "console"]
    options += ["--worker-start", "cold"]
    command = [sys.executable, "-m", "elastic_agent", *options, "--max-restarts", "0", str(script)]
    done = run_on_small_disk(state, "64k", ["sh", "-c", f'{fill}; exec "$@"', "sh", *command])
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    assert told
    for line in told:
        assert str(state) in line
        assert "free space" in line


# --- a home that cannot be searched ---------------------------------------------------------------


@pytest.fixture
def closed_home(tmp_path: Path) -> Path:
    """As root's home is to others (docker --user, sudo -u, su without -)."""
    home = tmp_path / "home"
    home.mkdir(mode=0)
    return home


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--state-dir", "HOME/x", "SCRIPT"], 'got "HOME/x", where HOME is not searchable by this user'),
        (["--log-dir", "HOME/x/y", "SCRIPT"], 'got "HOME/x/y", where HOME is not searchable by this user'),
        (["--event-journal", "HOME/j", "SCRIPT"], 'got "HOME/j", where HOME is not searchable by this user'),
        (["--config", "HOME/c", "SCRIPT"], 'cannot read "HOME/c": Permission denied'),
        (["HOME/x.py"], 'script "HOME/x.py" cannot be found: Permission denied; expected a Python file'),
        (["--no-python", "HOME/x"], 'program "HOME/x" is not an executable file'),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_paths_in_an_inaccessible_home_are_refused_in_one_line(
    closed_home: Path, script: Path, argv: list[str], said: str
) -> None:
    def named(text: str) -> str:
        return text.replace("HOME", str(closed_home)).replace("SCRIPT", str(script))

    shown = re.sub('"(.+?)"', lambda match: quoted(named(match[1])), said)
    assert named(shown) in refusal(*map(named, argv), under=without_overrides())
