"""The status page: what it serves, and to whom."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from elastic_agent.monitoring.goodput import Goodput
from elastic_agent.monitoring.status import GenerationStatus, NodeStatus, RunStatus
from elastic_agent.values import Endpoint
from elastic_agent.web.loop_source import LoopSource
from elastic_agent.web.metrics import metrics_text
from elastic_agent.web.server import CLIENTS, StatusServer
from tests.ports import free_port
from tests.waiting import GUARD_S
from tests.web.browser import browser

SCRAPE = """
global: {{scrape_interval: 1s}}
scrape_configs:
- job_name: run
  static_configs: [{{targets: ["{target}"]}}]
"""


def needs(program: str, package: str) -> pytest.MarkDecorator:
    """Skip a test where this program is not installed; such a test is marked ``prove``."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program} (Debian: {package})")


@pytest.fixture(autouse=True)
def _answers_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine pauses, the loop of an agent answers late, too."""
    monkeypatch.setattr("elastic_agent.web.loop_source.ANSWER_S", GUARD_S)


def running(nodes: int = 2) -> RunStatus:
    rows = tuple(
        NodeStatus(
            f"n{i}",
            "in the world",
            "running",
            "10.0.0.1",
            workers=2,
            first_rank=2 * i,
            step=7,
            seen_s=99.0,
            steps_per_s=2.5,
            waits=(0.1, 0.3),
            log_dir="/logs/mnist",
        )
        for i in range(nodes)
    )
    past = GenerationStatus(
        1,
        10.0,
        60.0,
        ("n0",),
        2,
        "worker n0/1 exited with code 1: <b>boom</b>",
        cause="root cause",
        failed=True,
    )
    now = GenerationStatus(2, 61.0, None, tuple(one.node_id for one in rows), 2 * nodes)
    return RunStatus(
        "mnist",
        "host0:29400",
        100.0,
        phase="running",
        generation=2,
        since_s=61.0,
        world_size=2 * nodes,
        restarts=1,
        max_restarts=3,
        nodes=rows,
        generations=(past, now),
        goodput=Goodput(60.0, 20.0),
        stragglers=("worker n1/1 (rank 3) is slower than the others",),
    )


@contextmanager
def served(determine: Callable[[], RunStatus], host: str = "127.0.0.1") -> Iterator[StatusServer]:
    """A server, and the loop in which the status is determined, as in an agent."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def status(run_id: str) -> RunStatus:
        return determine()

    servers: list[StatusServer] = []

    def start() -> None:
        source = LoopSource("the agent", lambda: ("mnist",), status)
        servers.append(StatusServer(Endpoint(host, 0), source))
        servers[0].start()
        ready.set()

    # One call of the loop only: a stop that came between two of them would be lost.
    loop.call_soon(start)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        assert ready.wait(GUARD_S)
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(servers[0].close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=GUARD_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def failed(nodes: int = 3) -> RunStatus:
    """A run that ended long ago; generation 2 was the last one that ran."""
    status = running(nodes)
    cause = "root cause: a full disk"
    ended = replace(status.generations[1], ended_s=110.0, end="n1/0 failed", cause=cause, failed=True)
    rows = tuple(
        NodeStatus(one.node_id, "ended", address=one.address, workers=2, seen_s=99.0) for one in status.nodes
    )
    return replace(
        status,
        asked_s=100000.0,
        phase="failed",
        since_s=111.0,
        reason="the restart budget is used up",
        world_size=0,
        nodes=rows,
        generations=(status.generations[0], ended),
        stragglers=(),
    )


def test_page_json_and_metrics_of_a_running_run() -> None:
    with served(running) as server:
        code, page = get(server.url)
        assert (code, "<title>running – mnist</title>" in page) == (200, True)
        assert "http://" not in page, "nothing is loaded from elsewhere"
        code, text = get(f"{server.url}api/status")
        assert (code, json.loads(text)["nodes"][1]["first_rank"]) == (200, 2)
        code, text = get(f"{server.url}metrics")
        assert code == 200
        samples = {
            (one.name, *sorted(one.labels.items())): one.value
            for family in text_string_to_metric_families(text)
            for one in family.samples
        }
        assert samples["elastic_agent_phase", ("phase", "running"), ("run", "mnist")] == 1
        assert samples["elastic_agent_restarts", ("run", "mnist")] == 1
        assert samples["elastic_agent_training_step", ("node", "n1"), ("run", "mnist")] == 7
        assert samples["elastic_agent_training_steps_per_second", ("node", "n1"), ("run", "mnist")] == 2.5
        waits = "elastic_agent_collective_wait_ratio", ("node", "n1"), ("run", "mnist"), ("slot", "1")
        assert samples[waits] == 0.3
        assert samples["elastic_agent_goodput_ratio", ("run", "mnist")] == 0.75
        assert get(f"{server.url}nothing")[0] == 404
        assert get(f"{server.url}../../etc/passwd")[0] == 404


@pytest.mark.prove
@needs("promtool", "prometheus")
def test_promtool_accepts_the_metrics() -> None:
    with served(running) as server:
        _, text = get(f"{server.url}metrics")
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.prove
@needs("prometheus", "prometheus")
def test_a_real_prometheus_scrapes_the_metrics(tmp_path: Path) -> None:
    port = free_port()
    with served(running) as server:
        target = server.url.removeprefix("http://").rstrip("/")
        (tmp_path / "prometheus.yml").write_text(SCRAPE.format(target=target))
        command = [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
        ]
        with (
            (tmp_path / "log").open("wb") as log,
            subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            ) as prometheus,
        ):
            try:
                scraped = scraped_by(f"http://127.0.0.1:{port}")
            finally:
                prometheus.terminate()
    found = {(one["metric"]["__name__"], one["metric"].get("node")): one["value"][1] for one in scraped}
    assert found["up", None] == "1"
    assert found["elastic_agent_generation", None] == "2"
    assert found["elastic_agent_training_step", "n1"] == "7"


def scraped_by(url: str) -> list[Any]:
    """The newest values of all series, once the target has been scraped; Prometheus has no event for that."""
    query = quote('{job="run"}')
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s:
        with suppress(urllib.error.URLError):
            code, text = get(f"{url}/api/v1/query?query={query}")
            if code == 200 and (series := json.loads(text)["data"]["result"]):
                return list(series)
        time.sleep(0.1)
    raise AssertionError("Prometheus has scraped nothing")


def test_nothing_can_be_changed() -> None:
    with served(running) as server:
        request = urllib.request.Request(f"{server.url}api/status", data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=GUARD_S)
        with refused.value as answer:
            assert answer.code == 501


def test_pages_of_other_sites_cannot_read_it_through_a_name_of_theirs() -> None:
    with served(running) as server:
        for host, code in (
            ("evil.example", 403),
            ("127.0.0.1.evil.example:80", 403),
            ("localhost:1", 200),
            ("[::1]", 200),
        ):
            assert get(f"{server.url}api/status", Host=host)[0] == code, host


def test_clients_that_send_nothing_keep_no_others_from_being_served_for_long() -> None:
    with served(running) as server:
        port = int(server.url.rsplit(":", 1)[1].strip("/"))
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS - 1)]
        assert get(f"{server.url}api/status")[0] == 200
        for one in silent:
            one.close()


def test_an_agent_that_hangs_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_agent.web.loop_source.ANSWER_S", 0.1)
    thaw = threading.Event()

    def frozen() -> RunStatus:
        thaw.wait()
        return running()

    with served(frozen) as server:
        try:
            code, text = get(f"{server.url}api/status")
        finally:
            thaw.set()
        assert (code, text) == (503, "the agent did not answer within 0.1 s\n")


def test_the_page_shows_300_nodes_and_takes_no_markup_from_messages() -> None:
    with served(lambda: running(300)) as server:
        _, shown = get(server.url)
        _, all_shown = get(f"{server.url}?run=mnist&all=1")
    assert "run mnist" in shown
    assert ">598-599</td>" not in shown, "all rows only on request"
    assert '<a href="?run=mnist&amp;all=1">show all</a>' in shown
    assert ">598-599</td>" in all_shown
    assert "&lt;b&gt;boom&lt;/b&gt;" in shown
    assert "1 of 3" in shown
    assert "75 %</b>goodput of this node<" in shown
    assert "2.5</b>steps per second<" in shown
    assert ">10-30 %</td>" in shown
    assert "worker n1/1 (rank 3) is slower than the others" in shown
    assert "output of the workers on each node: /logs/mnist" in shown
    assert 'title="training 1 min"' in shown


def test_the_page_names_nodes_that_do_not_train_first_and_why() -> None:
    odd = NodeStatus("n9", "refused", "idle", note="its <script> differs", workers=1)
    status = running()
    with served(lambda: replace(status, nodes=(*status.nodes, odd))) as server:
        _, shown = get(server.url)
    assert shown.index("n9</td>") < shown.index("n0</td>")
    assert '<span class="dot refused"></span>refused (idle): its &lt;script&gt; differs</td>' in shown


def test_the_page_of_a_run_that_forms_says_what_it_waits_for() -> None:
    status = RunStatus(
        "mnist", "host0:29400", 1.0, waiting_for="waiting for 2 more nodes", common_causes="a firewall"
    )
    with served(lambda: status) as server:
        _, shown = get(server.url)
    assert "not formed yet" in shown
    assert "waiting for 2 more nodes" in shown
    assert "a firewall" in shown
    assert "Generations" not in shown


class TwoRuns:
    """As a store that two runs use; a third one has been removed since it was listed."""

    def run_ids(self) -> list[str]:
        return ["mnist", "gone", "a run/with=odd&chars"]

    def status(self, run_id: str) -> RunStatus:
        if run_id == "gone":
            raise LookupError("gone")
        odd = "odd" in run_id
        return replace(failed() if odd else running(), run_id=run_id, restarts=2 if odd else 1)


def test_several_runs_are_told_apart() -> None:
    server = StatusServer(Endpoint("127.0.0.1", 0), TwoRuns())
    server.start()
    try:
        odd = quote("a run/with=odd&chars", safe="")
        assert json.loads(get(f"{server.url}api/status?run={odd}")[1])["restarts"] == 2
        code, text = get(f"{server.url}api/status")
        assert (code, "name one: ?run=RUN" in text) == (404, True)
        code, text = get(f"{server.url}api/status?run=other")
        assert (code, "no run of this name" in text) == (404, True)
        families = text_string_to_metric_families(get(f"{server.url}metrics")[1])
        restarts = {
            one.labels["run"]: one.value
            for family in families
            for one in family.samples
            if one.name == "elastic_agent_restarts"
        }
        assert restarts == {"mnist": 1, "a run/with=odd&chars": 2}
    finally:
        server.close()


def test_the_page_shows_at_once_why_a_run_failed() -> None:
    with served(failed) as server:
        assert '<pre id="cause">root cause: a full disk</pre>' in get(server.url)[1]
    with served(running) as server:
        assert 'id="cause"' not in get(server.url)[1]


def test_a_run_that_has_ended_is_shown_as_of_its_end() -> None:
    with served(failed) as server:
        _, shown = get(server.url)
    assert "1 d 3 h ago, in generation 2" in shown
    assert "nodes in the world" not in shown
    assert "</b>workers" not in shown
    assert "ended by a failure" in shown, "the legend"
    # 100 of the 101 s from the first generation to the end of the run are covered, not a sliver of a day.
    bars = re.findall(r'<i class="(\w+) failed" style="left:([\d.]+)%; width:([\d.]+)%', shown)
    assert [kind for kind, _, _ in bars] == ["past", "past"]
    assert float(bars[1][1]) + float(bars[1][2]) > 95


@pytest.mark.prove
@needs("chromium", "chromium")
def test_a_phone_shows_all_of_a_node_without_scrolling_sideways(tmp_path: Path) -> None:
    with served(lambda: running(300)) as server, browser(tmp_path) as page:
        page.resize(390, is_phone=True)
        page.open(server.url)
        page.wait_until("document.querySelectorAll('#nodes td').length")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate(
            "[...document.querySelectorAll('.wide')].every(one => one.scrollWidth <= one.clientWidth)"
        )
        right = "[...document.querySelectorAll('#nodes td')].map(one => one.getBoundingClientRect().right)"
        assert page.evaluate(f"Math.max(...{right})") <= 390
        # Without a header, each value has its name in front.
        assert page.evaluate("getComputedStyle(document.querySelector('#nodes tr')).display") == "none"
        named = "[...document.querySelectorAll('#nodes tr:last-child td')].map(one => one.dataset.name || '')"
        assert [one for one in page.evaluate(named) if one] == [
            "ranks",
            "step",
            "steps/s",
            "waits",
            "last collective",
            "lease",
            "seen",
        ]


@pytest.mark.prove
@needs("chromium", "chromium")
def test_a_root_cause_that_is_unfolded_stays_so_while_the_page_is_refreshed(tmp_path: Path) -> None:
    asked = itertools.count(7)

    def advancing() -> RunStatus:
        step, status = next(asked), running()
        rows = tuple(replace(one, step=step) for one in status.nodes)
        # A generation that begins adds a row.
        more = (*status.generations, GenerationStatus(3, 99.0, None, ("n0",), 2)) if step > 9 else ()
        return replace(status, nodes=rows, generations=more or status.generations)

    with served(advancing) as server, browser(tmp_path) as page:
        page.open(server.url)
        page.wait_until("document.querySelector('details')")
        page.evaluate("document.querySelector('details').open = true")
        page.evaluate("getSelection().selectAllChildren(document.querySelector('details pre'))")
        seen = int(page.evaluate(STEP))
        page.wait_until(f"{STEP} > {seen}")
        assert page.evaluate("getSelection().toString()") == "root cause"
        page.wait_until("document.querySelectorAll('#generations tr').length === 4")
        assert page.evaluate("document.querySelector('details').open")


STEP = (
    "+[...document.querySelectorAll('#facts div')]."
    "find(one => /training step/.test(one.textContent)).firstChild.textContent"
)
"""The step that the page shows."""


def test_several_runs_are_listed_on_the_page_and_each_has_one() -> None:
    server = StatusServer(Endpoint("127.0.0.1", 0), TwoRuns())
    server.start()
    try:
        (_, listed), (_, one), gone = (
            get(server.url),
            get(f"{server.url}?run=mnist"),
            get(f"{server.url}?run=x"),
        )
    finally:
        server.close()
    assert '<a href="?run=a%20run%2Fwith%3Dodd%26chars">' in listed
    assert '<span class="phase failed">failed</span>' in listed
    assert "the restart budget is used up" in listed
    assert "all runs" not in listed
    assert "all runs" in one
    assert "run mnist" in one
    assert "1 of 3" in one
    assert (gone[0], "no answer (there is no run of this name here" in gone[1]) == (404, True)


def test_labels_of_metrics_may_contain_anything() -> None:
    odd = 'a "run" \\ with\nlines, {braces} and größe'
    text = metrics_text([replace(running(), run_id=odd), running()]).decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(names)) == len(names), "each metric is described once"
    families = list(text_string_to_metric_families(text))
    assert {sample.labels["run"] for family in families for sample in family.samples} == {odd, "mnist"}
