"""A secret that the host of a store makes, and tells agents of its own user through MUNGE.

Each store has a secret of its own; agents that lose the store ask the next one for its secret. Like a greeting, the
question is a random name, and the answer is authenticated together with it:

    ask/<name>        the question; a hint in the inbox says that it is there
    told/<name>       a credential with the name and the secret, which only the host's user can decode

Every program that reaches the store can ask, and can read the answer, but not decode it. The agent that asked checks
that the user who made the credential is its own: others could answer with a secret that they know.
"""

from __future__ import annotations

import contextlib
import queue
import re
import secrets
import threading

from elastic_agent.logs import get_logger
from elastic_agent.transport.base import StoreLostError, TransportError, WrongKeyError
from elastic_agent.transport.munge import UNAUTHORIZED, Munge, MungeError, decode
from elastic_agent.transport.sealing import Secret
from elastic_agent.values import Endpoint

from .keys import ROOT, name_in
from .store import StoreClient

ASK = b"! "
"""Begins a hint to a question in the coordinator's inbox; no run has this name."""

SOURCE = "munge"
"""Stands among the ids of the coordinator's secrets (see :mod:`.greeting`) if it can be asked; no id is that short."""

ANSWER_S, NO_HOST_ANSWER_S = 10.0, 1.0
"""How long an answer is awaited: many agents may ask at once; and if no host seems to be there that answers."""

MOST_WAITING = 4096
_MAX_NAME = 64
_TOLD = re.compile(rb"elastic-agent secret 1 ([0-9a-f]{32}) ([0-9a-f]{64})")


class ToldSecret:
    """The secret of the store that this process used last. For any thread."""

    def __init__(self, munge: Munge) -> None:
        self._munge = munge
        self._lock = threading.Lock()
        self._known: Secret | None = None

    def own(self) -> Secret:
        """The secret of a store that this process hosts: the one of the store before, if it knows that."""
        with self._lock:
            if self._known is None:
                self._known = Secret((secrets.token_hex(32).encode(),))
            return self._known

    def known(self) -> Secret:
        """The secret of the store that this process used last. Raises ``StoreLostError``: it has used none yet."""
        with self._lock:
            if self._known is None:
                raise StoreLostError("the secret of the store is not known yet")
            return self._known

    def teller(self, client: StoreClient, secret: Secret) -> Teller:
        """Tells agents of this user that secret; ``client``: a connection of its own to the store."""
        return Teller(client, secret, self._munge)

    def of_store(self, client: StoreClient, endpoint: Endpoint, announced: list[str]) -> Secret:
        """The secret of the store that this connection leads to; its host is asked if it is not known.

        Args:
            client: the connection.
            endpoint: the store, as users write it.
            announced: the ids of its secrets, as anyone can write them.

        Raises:
            WrongKeyError: no host answers that has the same source, or it runs as another user.
            StoreLostError: the host did not answer, or the answer was disturbed.
        """
        known = self._known
        if known is not None and not set(announced).isdisjoint(known.ids):
            return known
        asked = self._ask(client, endpoint, can_answer=SOURCE in announced)
        with self._lock:
            self._known = asked
        return asked

    def _ask(self, client: StoreClient, endpoint: Endpoint, *, can_answer: bool) -> Secret:
        name = secrets.token_hex(16)
        key, question = f"{ROOT}/told/{name}", f"{ROOT}/ask/{name}"
        client.put(question, b"?")
        client.push(f"{ROOT}/inbox", f"{ASK.decode()}{name}")
        wait_s = ANSWER_S if can_answer else NO_HOST_ANSWER_S
        answer = client.peek(key) if client.wait(key, wait_s) else None
        client.delete([key, question])
        if answer is None and can_answer:
            raise StoreLostError(
                f"the host of the store at {endpoint} did not tell its secret within {wait_s:g} s"
            )
        if answer is None:
            raise WrongKeyError(
                f"the store at {endpoint} was started without --secret-source munge, which this agent has; start every "
                "agent with the same --secret-source, elastic-agent serve too"
            )
        return self._opened(answer, name, endpoint)

    def _opened(self, answer: bytes, name: str, endpoint: Endpoint) -> Secret:
        try:
            uid, payload = decode(answer)
        except MungeError as error:
            if error.code == UNAUTHORIZED:
                raise WrongKeyError(
                    f"the store at {endpoint} tells its secret to another user than that of this agent (user id "
                    f"{self._munge.uid}); start every agent as the same user, elastic-agent serve too"
                ) from None
            raise StoreLostError(
                f"what the store at {endpoint} told as its secret cannot be decoded: {error}"
            ) from None
        if uid != self._munge.uid:
            raise WrongKeyError(
                f"user {uid} answers for the store at {endpoint}; expected the user of this agent ({self._munge.uid}): "
                "start every agent as the same user, elastic-agent serve too"
            )
        told = secret_told(payload, name)
        if told is None:
            raise StoreLostError(
                f"what the store at {endpoint} told as its secret was disturbed by another program"
            )
        return told


def telling(name: str, secret: Secret) -> bytes:
    """What answers the question of this name."""
    return b"elastic-agent secret 1 %s %s" % (name.encode(), secret.values[0])


def secret_told(payload: bytes, name: str) -> Secret | None:
    """The secret in the answer to the question of this name; None: it is none, or the answer to another one."""
    found = _TOLD.fullmatch(payload)
    return Secret((found[2],)) if found is not None and found[1] == name.encode() else None


def store_secret(secret: Secret | Munge | None) -> Secret | ToldSecret | None:
    """How an agent or server knows the secret of its store, if there is one."""
    return ToldSecret(secret) if isinstance(secret, Munge) else secret


class Teller:
    """The host's part: answers questions, in a thread of its own, because ``munge`` may take long. For any thread."""

    def __init__(self, client: StoreClient, secret: Secret, munge: Munge) -> None:
        """``client``: a connection of its own to the store."""
        self._client = client
        self._secret = secret
        self._munge = munge
        self._asked: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._closed = False
        self._reported = False
        threading.Thread(target=self._serve, name="elastic-teller", daemon=True).start()

    def take(self, hint: bytes) -> None:
        """Answer a question, of which this hint was in the inbox. Too many at once are dropped: agents ask again."""
        name = name_in(hint.removeprefix(ASK)[:_MAX_NAME])
        if name is not None:
            with contextlib.suppress(queue.Full):
                self._asked.put_nowait(name)

    def close(self) -> None:
        """Answer no more."""
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._asked.put_nowait(None)

    def _serve(self) -> None:
        try:
            while (name := self._asked.get()) is not None and not self._closed:
                self._tell(name)
        except TransportError:
            return  # the store is closed

    def _tell(self, name: str) -> None:
        if self._client.peek(f"{ROOT}/ask/{name}") is None:
            return  # the answer is not awaited any more
        try:
            credential = self._munge.encode(telling(name, self._secret))
        except MungeError as error:
            if not self._reported:
                self._reported = True
                get_logger().warning(f"cannot tell agents the secret of the store: {error}")
            return
        self._reported = False
        self._client.put(f"{ROOT}/told/{name}", credential)
