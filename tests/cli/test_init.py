"""``elastic-agent init``: the settings file that it writes, and the short help."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from elastic_agent.config.settings import specs

from .support import elastic_agent


def effective(*argv: str) -> dict[str, object]:
    done = elastic_agent("settings", *argv)
    assert done.returncode == 0, done.stderr
    return tomllib.loads(done.stdout)


def test_the_file_has_what_was_given_and_every_default_as_a_comment(tmp_path: Path) -> None:
    path, given = (
        tmp_path / "lab.toml",
        ("--nnodes", "1:4", "--rdzv-endpoint", "lab1:29400", "--lease-ttl", "3"),
    )
    done = elastic_agent("init", "--output", str(path), *given)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"elastic-agent --config {path}" in done.stdout
    assert effective("--config", str(path)) == effective(*given)
    text = path.read_text()
    path.write_text(re.sub(r"(?m)^# (\w+ = [^#]*[^ #])$", r"\1", text).replace('"train.py"', f'"{__file__}"'))
    assert path.read_text() != text
    changed = {"script": __file__, "script_args": ["--epochs", "10"]}
    assert effective("--config", str(path)) == effective(*given) | changed, (
        "a default is not written as it is"
    )


def test_a_setting_without_a_default_is_shown_with_an_example_that_is_accepted() -> None:
    written = elastic_agent("init", "--output", "-").stdout
    examples = re.findall(r"(?m)^# ((\w+) = .*  # an example; default: .+)$", written)
    assert len(examples) > 20
    assert not re.search(r"(?m)^# \w+ =(?:$|  )", written), "nothing to be set"
    kinds = {spec.name: spec.kind for spec in specs()}
    for line, name in examples:
        kinds[name].read(tomllib.loads(line)[name], name)


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text("max_restarts = 7\n")
    done = elastic_agent("init", "--output", str(path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "exists; name another file" in done.stderr
    assert path.read_text() == "max_restarts = 7\n"


def test_the_script_and_its_arguments_are_in_the_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    done = elastic_agent("init", "--output", "-", str(script), "--name", 'a "b"')
    assert done.returncode == 0
    assert f'script = "{script}"\nscript_args = ["--name", "a \\"b\\""]\n' in done.stdout


def test_the_short_help_fits_on_a_screen_and_names_the_whole_one() -> None:
    short, whole = elastic_agent("-h"), elastic_agent("--help")
    assert (short.returncode, whole.returncode) == (0, 0)
    assert len(short.stdout.splitlines()) <= 60 < len(whole.stdout.splitlines())
    assert "elastic-agent --help" in short.stdout
    listed = set(re.findall(r"(?m)^  (--[\w-]+)", short.stdout))
    assert len(listed) == 10
    assert listed <= set(re.findall(r"--[\w-]+", whole.stdout))
