"""How a client and a store's coordinator prove to each other that they have the same secret.

The client writes a random name, sealed; the coordinator answers with the run's epoch, sealed under that name. As the
name was never used before, the answer is no recording, and neither are the records of that epoch:

    hello/<name>      what is asked, sealed; a hint in the inbox says that it is there
    welcome/<name>    the answer, sealed; or "!" if the greeting does not verify

    "run ID": the epoch of this run. "job FINGERPRINT ID": the id of the run that agents with this job agreed on; if
    there is none, it is this one from now on. "over FINGERPRINT ID": that run of the job is over.

    The name ends in that of the client's machine, for the host's log. "- MACHINE", in the inbox: an agent there has no
    secret.

    key               the ids of the coordinator's secrets, as a hint for error messages; missing if it has none
"""

from __future__ import annotations

import contextlib
import platform
import re
import secrets
import threading
import time
from collections.abc import Iterator

from elastic_agent.logs import get_logger
from elastic_agent.transport.base import StoreLostError, TransportError, WrongKeyError
from elastic_agent.transport.sealed_records import RunSeal
from elastic_agent.transport.sealing import EPOCH_BYTES, Secret, Unverified
from elastic_agent.values import Endpoint

from .keys import ROOT, name_in
from .sealed import sealed
from .store import StoreClient

HELLO = b"? "
"""Begins a hint to a greeting in the coordinator's inbox; no run has this name."""

REFUSED = b"- "
"""Begins a hint of an agent that has no secret; no run has this name."""

TOLD_EVERY_S = 60.0
"""How often the host tells of the agents of a machine that were refused."""

ANSWER_S = 5.0
NO_KEY_ANSWER_S = 1.0
"""How long an answer is awaited where the coordinator seems to have another secret, or none."""

_IDS = f"{ROOT}/key"
_MAX_NAME = 64
_MAX_REPORTED = 100


def announce(client: StoreClient, secret: Secret | None) -> None:
    """Have clients without the secret know that they need it."""
    if secret is not None:
        client.put(_IDS, ",".join(secret.ids).encode())


class Numbers:
    """How far the numbered records of a run have come, by what all connections of this process have seen.

    A new connection may find an earlier record that another program has written back.
    """

    def __init__(self) -> None:
        self._known: tuple[bytes, dict[str, int]] = (b"", {})

    def of(self, epoch: bytes) -> dict[str, int]:
        """The highest number seen under each key in this epoch."""
        if self._known[0] != epoch:
            self._known = (epoch, {})
        return self._known[1]


def greeted(
    client: StoreClient,
    endpoint: Endpoint,
    run_id: str,
    secret: Secret | None,
    numbers: Numbers | None = None,
    *,
    answer_s: float = ANSWER_S,
) -> StoreClient:
    """The connection with the records of this run: sealed in its epoch, if there is a secret.

    Args:
        client: the connection.
        endpoint: the store, as users write it.
        run_id: the run.
        secret: of this agent; None: it has none.
        numbers: of the run's records, shared by all connections of this process to it; None: this one alone.
        answer_s: for how long to wait for the coordinator's answer.

    Raises:
        WrongKeyError: the coordinator has another secret, or only one of the two has one.
        StoreLostError: the coordinator does not answer.
    """
    _check_no_secret(client, endpoint, secret)
    if secret is None:
        return client
    epoch = _asked(client, endpoint, f"run {run_id}", secret, answer_s)
    if len(epoch) != EPOCH_BYTES:
        raise _mismatch(client, endpoint, secret)
    newest = numbers.of(epoch) if numbers is not None else {}
    return sealed(client, RunSeal(secret.seal(), secret.seal(epoch), newest))


def agreed(client: StoreClient, endpoint: Endpoint, fingerprint: str, proposal: str, secret: Secret) -> str:
    """The run id of this job, as the coordinator knows it; else ``proposal``. Errors as for :func:`greeted`."""
    answer = _asked(client, endpoint, f"job {fingerprint} {proposal}", secret, ANSWER_S)
    if (name := name_in(answer)) is None:
        raise _mismatch(client, endpoint, secret)
    return name


def released(client: StoreClient, endpoint: Endpoint, fingerprint: str, run_id: str, secret: Secret) -> None:
    """That run of the job is over: the next one is another run. Errors as for :func:`greeted`."""
    _asked(client, endpoint, f"over {fingerprint} {run_id}", secret, ANSWER_S)


def check_no_secret_needed(client: StoreClient, endpoint: Endpoint) -> None:
    """Raise ``WrongKeyError`` if the coordinator has a secret."""
    _check_no_secret(client, endpoint, None)


def _check_no_secret(client: StoreClient, endpoint: Endpoint, secret: Secret | None) -> None:
    if secret is None and (theirs := _ids(client)):
        with contextlib.suppress(TransportError):  # it is for the host's log alone
            client.push(f"{ROOT}/inbox", f"{REFUSED.decode()}{_machine()}")
        raise WrongKeyError(
            f"the store at {endpoint} accepts only agents with its secret (key id {theirs[0]}), and this agent has "
            "none; pass the same --secret-file to every agent"
        )


def _asked(client: StoreClient, endpoint: Endpoint, question: str, secret: Secret, answer_s: float) -> bytes:
    """The coordinator's answer, which only a program with the secret can have given, and only after the question."""
    theirs = _ids(client)
    base = secret.seal()
    known = sealed(client, RunSeal(base, base))
    name = f"{secrets.token_hex(16)}.{_machine()}"[:_MAX_NAME]
    known.put(f"{ROOT}/hello/{name}", question.encode())
    client.push(f"{ROOT}/inbox", f"{HELLO.decode()}{name}")
    key = f"{ROOT}/welcome/{name}"
    is_shared = not set(theirs).isdisjoint(secret.ids)
    answer = known.peek(key) if client.wait(key, answer_s if is_shared else NO_KEY_ANSWER_S) else None
    client.delete([key, f"{ROOT}/hello/{name}"])
    if answer is None and is_shared:
        raise StoreLostError(
            f"the coordinator of the store at {endpoint} did not answer within {answer_s:g} s"
        )
    if isinstance(answer, Unverified) and is_shared:
        raise StoreLostError(f"the greeting at the store at {endpoint} was disturbed by another program")
    if answer is None or isinstance(answer, Unverified):
        raise _mismatch(client, endpoint, secret)
    return answer


def _ids(client: StoreClient) -> list[str]:
    """The ids of the coordinator's secrets, as the store has them."""
    announced = (client.peek(_IDS) or b"")[:256].decode("ascii", "replace").split(",")
    return [one for one in announced if len(one) == 8 and one.isalnum()]


def _mismatch(client: StoreClient, endpoint: Endpoint, secret: Secret) -> WrongKeyError:
    theirs = _ids(client)
    if not theirs:
        return WrongKeyError(
            f"the store at {endpoint} was started without a secret, and this agent has one (key id {secret.ids[0]}); "
            "start every agent with the same --secret-file, elastic-agent serve too"
        )
    return WrongKeyError(
        f"the store at {endpoint} has another secret (key id {theirs[0]}) than this agent (key id {secret.ids[0]}); "
        "give every agent the same --secret-file, elastic-agent serve too"
    )


def _machine() -> str:
    """Return the name of this machine, in the characters that names may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())


class Refusals:
    """Logs that agents were refused. Anybody may cause that, so it is said of a hundred machines at most."""

    def __init__(self) -> None:
        self._told_s: dict[str, float] = {}
        """When an agent of a machine was last said to be refused, by the machine's name."""

    def report(self, machine: str, why: str, now_s: float) -> None:
        """Log that an agent on this machine was refused, if that was not said lately; ``why``: and what to do."""
        told_s = self._told_s.get(machine, now_s - TOLD_EVERY_S)
        is_known = machine in self._told_s or len(self._told_s) < _MAX_REPORTED
        if is_known and now_s - told_s >= TOLD_EVERY_S:
            self._told_s[machine] = now_s
            get_logger().warning(f"refused an agent{f' on {machine}' if machine else ''}: {why}")

    def has_secret(self, hint: bytes, now_s: float) -> None:
        """Log that an agent with a secret has greeted, of which this hint was in the inbox, where there is none."""
        name = name_in(hint.removeprefix(HELLO)[:_MAX_NAME])
        if name is not None:
            why = "it has a secret, and this store has none; start every agent with the same --secret-file, or none"
            self.report(name.partition(".")[2], why, now_s)


class Doorkeeper:
    """The coordinator's part: knows the epoch of each run, and tells it to clients that have the secret.

    For any thread.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._base = secret.seal()
        self._lock = threading.RLock()
        self._epochs: dict[str, bytes] = {}
        self._runs: dict[str, RunSeal] = {}
        self._jobs: dict[str, str] = {}
        """The run of each job, by its fingerprint."""
        self._refusals = Refusals()

    def seals(self, run_id: str) -> RunSeal:
        """The seals of this run. Nothing verifies under those of a run that no client has greeted."""
        with self._lock:
            return self._runs.get(run_id) or self._in_epoch(secrets.token_bytes(EPOCH_BYTES))

    def answer(self, client: StoreClient, hint: bytes) -> None:
        """Answer a greeting, of which this hint was in the inbox."""
        name = name_in(hint.removeprefix(HELLO)[:_MAX_NAME])
        if name is None:
            return
        known = sealed(client, RunSeal(self._base, self._base))
        greeting = known.peek(f"{ROOT}/hello/{name}")
        if greeting is None:
            return  # it is not awaited any more
        if isinstance(greeting, Unverified):
            self._report(name.partition(".")[2], greeting.why, time.monotonic())
            client.put(f"{ROOT}/welcome/{name}", b"!")  # it does not verify either
        else:
            known.put(f"{ROOT}/welcome/{name}", self._answer(greeting) or b"!")

    def refused(self, hint: bytes, now_s: float) -> None:
        """Log that an agent without a secret has given up."""
        machine = name_in(hint.removeprefix(REFUSED)[:_MAX_NAME])
        if machine is not None:
            self._report(machine, "it has no secret", now_s)

    def _answer(self, question: bytes) -> bytes:
        """Empty: it is none."""
        what, *names = question.split(b" ")
        match what, [name_in(one) for one in names]:
            case b"run", [str(run_id)]:
                return self.epoch(run_id)
            case b"job", [str(fingerprint), str(proposal)]:
                with self._lock:
                    return self._jobs.setdefault(fingerprint, proposal).encode()
            case b"over", [str(fingerprint), str(run_id)]:
                with self._lock:
                    if self._jobs.get(fingerprint) == run_id:
                        del self._jobs[fingerprint]
                return run_id.encode()
            case _:
                return b""

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """While the life of a run ends, no node learns its epoch: it would register in a life that is over."""
        with self._lock:
            yield

    def forget(self, run_id: str) -> None:
        """The records of this run were removed: its next life is another epoch."""
        with self._lock:
            self._jobs = {job: run for job, run in self._jobs.items() if run != run_id}
            self._runs.pop(run_id, None)
            self._epochs.pop(run_id, None)

    def epoch(self, run_id: str) -> bytes:
        """The epoch of this run; a new one if it has none."""
        with self._lock:
            if run_id not in self._epochs:
                epoch = self._epochs[run_id] = secrets.token_bytes(EPOCH_BYTES)
                self._runs[run_id] = self._in_epoch(epoch)
            return self._epochs[run_id]

    def _in_epoch(self, epoch: bytes) -> RunSeal:
        return RunSeal(self._base, self._secret.seal(epoch))

    def _report(self, machine: str, why: str, now_s: float) -> None:
        remedy = "start it with the secret of this run (--secret-file)"
        self._refusals.report(machine, f"{why}; {remedy}", now_s)
