"""The documents say what is so, as far as a program can tell: links, commands, options, variables, messages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from elastic_agent.agent.worker_group.command import RunFacts, worker_environment
from elastic_agent.cli.help import help_page
from elastic_agent.cli.main import COMMANDS, load_command, main
from elastic_agent.config.errors import HelpRequested
from elastic_agent.config.settings import Settings, specs
from elastic_agent.exit_codes import MEANINGS, ExitCode
from elastic_agent.protocol.records import Address, Seat, World
from elastic_agent.worker_variables import PREFIX, WORKER_VARIABLES
from tests.simulator.__main__ import argument_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md"))
)
OTHER_PROGRAMS_OPTIONS = {
    # systemctl, pip, git, docker, pytest, the simulator: each where it is named in a command of its own
    "--no-python",
    "--shm-size",
    "--strict",
    "--now",
    "--no-block",
    "--user",
    "--system",
    "--home-dir",
    "--shell",
}


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def prose_of(page: str) -> str:
    """Without code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text_of(page), flags=re.M | re.S)


def test_the_state_diagram_is_the_one_made_from_the_table() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "state_diagram.py", "--check"], stdout=subprocess.PIPE, text=True
    )
    assert made.returncode == 0, made.stdout


# -- links --------------------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    """What headings can be linked by, as GitHub makes it."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose_of(page), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 1
        name = slug
        while name in found:
            name = f"{slug}-{number}"
            number += 1
        found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_are_not_broken(page: str) -> None:
    folder = (ROOT / page).parent
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue  # other people's pages are theirs to keep
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else ROOT / page
        if not file.exists():
            broken.append(target)
        elif anchor and anchor not in anchors(file.relative_to(ROOT).as_posix()):
            broken.append(f"{target}: no such heading")
    assert broken == []


def test_a_broken_link_is_detected() -> None:
    assert "which-ports-must-be-open" in anchors("docs/troubleshooting.md")
    assert "which-ports-must-be-shut" not in anchors("docs/troubleshooting.md")


def test_every_page_can_be_found_from_the_index() -> None:
    linked = {*re.findall(r"\]\(([^)]+)\)", text_of("README.md").partition("## Documentation")[2])}
    assert {page for page in PAGES if page.startswith("docs/")} <= linked


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    """In backticks, with a folder of this repository at the beginning."""
    named = re.findall(
        r"`((?:src|tests|docs|examples|benchmarks|evaluation|deploy|tools)/[\w./@*-]+)`", text_of(page)
    )
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_modules_that_the_architecture_page_names_exist() -> None:
    """A name without a folder belongs to the folder of a name before it."""
    package = ROOT / "src/elastic_agent"
    for paragraph in re.split(
        r"\n(?=\d\. |\||\n)", text_of("docs/internals.md").partition("\n## Protocol")[0]
    ):
        folders = [""]
        for name in re.findall(r"`([a-z][a-z0-9_/]*(?:\.py|/))`", paragraph):
            found = [folder for folder in folders if (package / folder / name).exists()]
            assert found, f"{name}: no such module, in: {paragraph}"
            folders.append(f"{found[0]}/{name.rpartition('/')[0]}".strip("/"))


# -- commands and options -----------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.M))


def words_in_code(page: str) -> list[str]:
    """Lines of code blocks and spans in backticks."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text_of(page), re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", prose_of(page))
    return [line for block in blocks for line in block.splitlines()] + spans


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_that_are_named_exist(page: str) -> None:
    named = [
        target
        for words in words_in_code(page)
        for target in re.findall(r"""^make(?: [A-Z_]+=(?:["'][^"']*["']|\S+))* ([a-z][a-z-]*)""", words)
    ]
    assert {*named} <= make_targets()


def read_page(command: str) -> str:
    """Return the page of a command."""
    try:
        load_command(command)(["--help"])
    except HelpRequested as requested:
        return "".join(requested.args)
    raise AssertionError(command)


@pytest.mark.parametrize("page", PAGES)
def test_options_that_are_named_exist(page: str) -> None:
    ours = {spec.flag for spec in specs()} | {spec.short for spec in specs() if spec.short}
    pages = map(read_page, COMMANDS)
    ours |= {"--help", "--version", *re.findall(r"--[a-z]+(?:-[a-z]+)*", "".join(pages))}
    ours |= {flag.replace("-", "_").replace("__", "--", 1) for flag in ours}
    unknown = []
    for words in words_in_code(page):
        command = words.strip().split(" ")[0].rsplit("/", 1)[-1]
        about_us = command in {"elastic-agent", "torchrun"} or command.startswith("--")
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", words):
            if about_us and option not in ours | OTHER_PROGRAMS_OPTIONS and not is_the_scripts(words, option):
                unknown.append(f"{option} in: {words}")
    assert unknown == []


def is_the_scripts(words: str, option: str) -> bool:
    """Whether it stands after a script, as in ``elastic-agent train.py --epochs 90``."""
    script = re.search(r"\S+\.py\b", words)
    return script is not None and words.index(option) > script.start()


def test_stated_defaults_are_correct() -> None:
    defaults = {spec.flag: spec.default for spec in specs()}
    text = "".join(text_of(f"docs/{page}.md") for page in ("troubleshooting", "start", "internals"))
    stated = re.findall(r"`(--[a-z-]+)(?: [A-Z]+)?`\s*\((\d+)(?: m?s)?\b", text)
    stated += re.findall(r"^\| `(--[a-z-]+)` \| (\d+)(?: s)? \|", text, re.M)
    assert len(stated) > 10
    wrong = [(flag, told) for flag, told in stated if float(defaults[flag] or "nan") != float(told)]
    assert wrong == []


def test_commands_that_are_named_exist() -> None:
    named = {
        match
        for page in PAGES
        for words in words_in_code(page)
        for match in re.findall(r"^(?:\S*/)?elastic-agent ([a-z]+)(?=\s|$)", words)
    }
    assert named - {"statsu"} <= COMMANDS.keys(), "statsu is an example of a mistyped command"
    assert len(named) > 5


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_listed_and_has_a_page_of_its_own(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == ExitCode.FINISHED
    page = capsys.readouterr().out
    assert page.startswith(f"Usage: elastic-agent {'[run]' if name == 'run' else name}")
    for listing in (help_page(), (ROOT / "README.md").read_text()):
        assert name == "run" or re.search(rf"elastic-agent {name}\b", listing)


def test_nothing_recommends_a_package_of_this_name_from_an_index() -> None:
    """Nothing has been published: whoever registers the name would be installed."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / page for page in PAGES)]
    named = re.compile(r"""pip install\b[^`\n]*['"\s]elastic[-_]agent(?:['"\s\[=<>~]|$)""", re.M)
    assert [str(file) for file in files if named.search(file.read_text())] == []


def test_options_of_the_simulator_exist() -> None:
    known = argument_parser().format_help()
    commands = [
        words
        for page in PAGES
        for words in words_in_code(page)
        if words.strip().startswith("python -m tests.simulator")
    ]
    assert commands
    for words in commands:
        for option in re.findall(r"--[a-z-]+", words):
            assert option in known, words
        for mutant in re.findall(r"--mutant ([a-z-]+)", words):
            assert mutant in known, words


def test_rules_that_the_protocol_page_attributes_to_the_simulator_are_there() -> None:
    rules = ("checker.py", "notice_rules.py", "budget_rules.py", "parking_rules.py")
    checker = "".join((ROOT / "tests/simulator" / name).read_text() for name in rules)
    faults = (ROOT / "tests/simulator/scenario.py").read_text()
    promises = text_of("docs/internals.md").partition("## What is promised")[2].partition("\n## ")[0]
    quoted = [name for row in promises.splitlines() for name in re.findall(r'"([^"]+)"', row) if "|" in row]
    assert len(quoted) > 8
    assert [name for name in quoted if f'"{name}' not in checker and f'"{name}"' not in faults] == []


# -- what is stated as a table ------------------------------------------------------------------


def test_the_table_of_exit_codes_is_complete() -> None:
    table = re.split(r"^#+ Exit codes$", text_of("docs/troubleshooting.md"), flags=re.M)[1]
    table = re.split(r"^#+ ", table, flags=re.M)[0]
    assert re.findall(r"^\| (\d+) \|", table, re.M) == [str(int(code)) for code in ExitCode]


def test_exit_codes_on_the_troubleshooting_page_match_the_program() -> None:
    page = text_of("docs/troubleshooting.md").replace("`", "")
    for code, meaning in MEANINGS.items():
        if code is not ExitCode.INTERNAL:
            assert f"| {int(code)} | {meaning.partition(':')[0]}" in page, meaning


def test_variables_of_workers_are_those_that_the_agent_sets() -> None:
    section = text_of("docs/script.md").partition("## In the environment")[2].partition("\n## ")[0]
    named = {
        name
        for row in section.splitlines()
        if row.startswith("|")
        for name in re.findall(r"`([A-Z_]+)`", row)
    }
    seat = Seat("n1", "abc", "10.0.0.1", 2, 0)
    world = World(1, (seat,), Address("10.0.0.1", 29500), "n1")
    memory = ["/proc/1/fd/3:/proc/1/fd/4"] * 2
    facts = RunFacts("run", 0, "/dev/shm/x", "eth0", "agent", memory, "keep")
    settings = Settings(virtual_local_rank=True, survive="keep")
    inherited = {"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "16"}
    given = worker_environment(inherited, settings, facts, world, seat, 0).keys() | {
        "TORCHELASTIC_ERROR_FILE"
    }  # GenerationLogs
    assert named == given
    assert {name for name in given if name.startswith(PREFIX)} == WORKER_VARIABLES


def test_the_requirements_that_are_stated_are_those_of_the_package() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    python = project["requires-python"].removeprefix(">=")
    torch = next(requirement for requirement in project["dependencies"] if requirement.startswith("torch"))
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {python}" in text_of(page)
    assert f"PyTorch {re.findall(r'>=([0-9.]+)', torch)[0]}" in text_of("README.md")


# -- what the program says ----------------------------------------------------------------------


@cache
def sayings() -> str:
    """Every text in the program, one a line; what is filled in when it runs is left out."""
    texts = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def pieces(quote: str) -> list[str]:
    """The parts of a quoted message that do not change from one time to the next."""
    changing = (
        r"…|\d[\d.:]*|\bSIG[A-Z]+|\w+Error\b|\b(?:node|worker)s?\b|[\"]"
        r"|\b(?:n\d|exp7|digits|NAME|RUN|vm|host0)\b(?:[-/]\S*)?"
    )
    parts = [re.sub(r" (at|for)$", "", part.strip(" ;,()")) for part in re.split(changing, quote)]
    return [part for part in parts if len(part) >= 8]


def quoting_lines(page: str) -> list[str]:
    """Headings that are a message, and the rows of tables that explain messages."""
    lines, of_messages = [], False
    for line in text_of(page).splitlines():
        of_messages = line.startswith("|") and (of_messages or re.match(MESSAGE_TABLES, line) is not None)
        if line.startswith("### `") or of_messages or (page == TROUBLESHOOTING and line.startswith("| `")):
            lines.append(line)
    return lines


TROUBLESHOOTING = "docs/troubleshooting.md"
MESSAGE_TABLES = r"\| (error message|symptom|status)\b"
QUOTES = sorted(
    {
        quote
        for page in (TROUBLESHOOTING, "docs/etcd.md", "docs/slurm.md", "docs/systemd.md")
        for line in quoting_lines(page)
        for quote in re.findall(r"`([^`]+)`", line.split(" | ")[0])
        if not re.match(r"--|sbatch |srun --", quote) and " " in quote
    }
    | {
        "local workers are done; keeping the rendezvous store up for run exp7 until it ends",
        "waiting for the workers of n2 to stop or their lease to expire",
    }
)
OTHERS_SAY = {"Connection refused", "Connection reset by peer", "NCCL error", "Read error"}


@pytest.mark.parametrize("quote", [quote for quote in QUOTES if quote not in OTHERS_SAY])
def test_quoted_messages_exist_in_the_program(quote: str) -> None:
    missing = [piece for piece in pieces(quote) if piece not in sayings()]
    assert missing == [], "look for it in docs/"


def test_a_message_that_does_not_exist_is_detected() -> None:
    assert len(QUOTES) > 20
    assert [piece for piece in pieces("waiting for the moon at …") if piece not in sayings()]
