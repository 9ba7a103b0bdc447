"""One connection to one member of an etcd cluster: every call bounded in time, every error in one line.

A connection belongs to the event loop in which it was dialled.

A call that ends without an answer raises ``StoreLostError``: the request may have been carried out. The only call
that is repeated here is one that etcd rejected because the login had expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastic_agent.protocol import RevisionTimes
from elastic_agent.transport.addresses import connect, local_address_towards
from elastic_agent.transport.base import (
    NotAStoreError,
    Obstacle,
    StoreLostError,
    TransportError,
    UnreachableError,
    WrongKeyError,
)
from elastic_agent.transport.blocking_call import run_abandonable
from elastic_agent.transport.certificates import SERVER_NAME, Secret
from elastic_agent.transport.keys import STORE_ID
from elastic_agent.values import Endpoint, EtcdAccess

from .api import grpc, is_missing, put, rpc

CALL_TIMEOUT_S = 1.0
"""A member that does not answer within this time is given up for another one."""

DIAL_TIMEOUT_S = 30.0
"""An attempt to connect that takes longer is abandoned: looking a name up has no time-out of its own."""

MAX_OPERATIONS = 120
"""Operations in one transaction; etcd's default limit is 128."""

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.enable_retries", 0),  # whether a call may be repeated, only its caller knows
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # for the web: etcd is inside the cluster, and named by address here
)
AGE_KNOWN_S = 2 * 3600
"""The time for which the age of an etcd's life is known: for the longest lease, and as much margin."""

NAME_WITH_AGE = re.compile(r"[0-9a-f]{16}L([0-9a-f]{1,16})")

_FAULTS_OF_ETCD = {
    ("database space exceeded",): "is full (NOSPACE alarm): compact and defragment it, then disarm the alarm",
    ("too large", "larger than max"): "rejects messages of this size ({}); raise its --max-request-bytes",
    ("unhealthy cluster",): "has not been connected to all other members for 5 s yet",
    ("no leader", "leader changed", "not capable"): "has no leader; a majority of its members must be up",
}
"""Words of its errors, and what they mean."""
_BAD_CERTIFICATE = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification")
_NOT_HTTP2 = ("Failed parsing HTTP/2", "WRONG_VERSION_NUMBER", "missing selected ALPN")
"""Words of gRPC for a server of another protocol."""

_EXPIRED_LOGIN = ("invalid auth token", "invalid auth revision", "revision of auth store is old")


class CompactedError(Exception):
    """The revisions that were to be watched are gone; what is there now has to be read."""


class LeaseGoneError(Exception):
    """The etcd lease ran out or was revoked."""


@dataclass(frozen=True)
class News:
    """The result of a watch: the revision to continue from, and the keys written or deleted since the last time."""

    next_revision: int
    written: dict[bytes, bytes]
    deleted: frozenset[bytes]


@dataclass(eq=False, repr=False)
class EtcdClient:
    """One connection, and the login that goes with it; see :meth:`dial`."""

    channel: Any
    endpoint: Endpoint
    access: EtcdAccess
    secret: Secret | None
    local_address: str
    timeout_s: float

    def __post_init__(self) -> None:
        self.store, self.times = "", RevisionTimes()
        """The name of this life of the etcd, and when this process first saw its revisions; set once that is known."""
        self._kv = rpc.KVStub(self.channel)
        self._leases = rpc.LeaseStub(self.channel)
        self._auth = rpc.AuthStub(self.channel)
        self._cluster = rpc.ClusterStub(self.channel)
        self._maintenance = rpc.MaintenanceStub(self.channel)
        # etcd takes requests for ever on both, but gets one; and keeping a lease alive once has one answer.
        self._watch = _calls(self.channel.unary_stream, "Watch/Watch", rpc.WatchRequest, rpc.WatchResponse)
        self._keep_alive = _calls(
            self.channel.unary_unary,
            "Lease/LeaseKeepAlive",
            rpc.LeaseKeepAliveRequest,
            rpc.LeaseKeepAliveResponse,
        )
        self._has_answered = False
        self._token: str | None = None
        self._open = True
        self._calls: set[Any] = set()
        """Calls in progress, and watches."""

    @classmethod
    async def dial(
        cls,
        endpoint: Endpoint,
        access: EtcdAccess,
        timeout_s: float = CALL_TIMEOUT_S,
        secret: Secret | None = None,
    ) -> EtcdClient:
        """Connect and log in.

        Args:
            endpoint: of the member.
            access: prefix, certificates and user.
            timeout_s: for this and for each call.
            secret: connect with certificates made from it, in place of those of ``access``.

        Raises:
            UnreachableError: nothing listens there, or a login is not answered in time.
            NotAStoreError: the certificates or the login are not accepted.
        """
        local_address, numeric, own = await run_abandonable(
            lambda: _reach(endpoint, access, timeout_s, secret), DIAL_TIMEOUT_S
        )
        if own is None:
            channel = grpc.aio.insecure_channel(numeric, options=_OPTIONS)
        else:
            name = endpoint.host if secret is None else SERVER_NAME  # which the certificate there is to have
            options = (*_OPTIONS, ("grpc.ssl_target_name_override", name))
            channel = grpc.aio.secure_channel(numeric, own, options=options)
        client = cls(channel, endpoint, access, secret, local_address, timeout_s)
        try:
            if access.user:
                await client._log_in()
        except StoreLostError as error:
            client.close()
            raise UnreachableError(str(error), error.obstacle) from None
        except BaseException:
            client.close()
            raise
        return client

    def close(self) -> None:
        """Take no more calls, end those in progress, close the connection; does not block."""
        if self._open:
            self._open = False
            calls, self._calls = self._calls, set()
            for call in calls:
                call.cancel()
            with contextlib.suppress(StopIteration):
                self.channel.close().send(None)  # without a grace it waits for nothing

    # -- keys -----------------------------------------------------------------------------------

    async def get(self, key: bytes) -> Any | None:
        """Return the key's KeyValue, or None."""
        found = await self.range(key)
        return found.kvs[0] if found.kvs else None

    async def range(self, key: bytes, end: bytes | None = None, *, keys_only: bool = False) -> Any:
        """Return the RangeResponse of a key, or of all from ``key`` up to ``end``; as a majority of etcd has it."""
        request = rpc.RangeRequest(key=key, range_end=end or b"", keys_only=keys_only)
        return await self._ask(self._kv.Range, request)

    async def transact(
        self, compare: Sequence[Any], then: Sequence[Any], otherwise: Sequence[Any] = ()
    ) -> Any:
        """Return the TxnResponse: ``then`` was done if all of ``compare`` held, else ``otherwise``.

        Raises:
            LeaseGoneError: a key was to hang on a lease that is gone; nothing was written.
        """
        request = rpc.TxnRequest(compare=compare, success=then, failure=otherwise)
        return await self._ask(self._kv.Txn, request)

    async def _ask(self, method: Callable[..., Any], request: Any) -> Any:
        answer = await self._call(method, request)
        self._saw(int(answer.header.revision))
        return answer

    def _saw(self, revision: int) -> None:
        self.times.saw(self.store, revision, time.monotonic())

    def written_by(self, revision: int) -> float | None:
        """Return the latest time (``time.monotonic()``) at which this revision can have been written, if known."""
        return self.times.written_by(self.store, revision)

    # -- leases ---------------------------------------------------------------------------------

    async def grant(self, ttl_s: int) -> int:
        """Return a new etcd lease; its id."""
        answer = await self._call(self._leases.LeaseGrant, rpc.LeaseGrantRequest(TTL=ttl_s))
        return int(answer.ID)

    async def keep_alive(self, lease_id: int) -> None:
        """Keep the lease alive: its time starts again.

        Raises:
            LeaseGoneError: it is gone.
        """
        request = rpc.LeaseKeepAliveRequest(ID=lease_id)
        answer = await self._call(self._keep_alive, request)
        if answer is None:
            raise StoreLostError(f"etcd at {self.endpoint} closed a stream")
        if answer.TTL <= 0:
            raise LeaseGoneError(f"etcd lease {lease_id:x} has expired")

    async def left_s(self, lease_id: int) -> int:
        """Return how many whole seconds the lease has left; negative if it is gone."""
        request = rpc.LeaseTimeToLiveRequest(ID=lease_id)
        try:
            return int((await self._call(self._leases.LeaseTimeToLive, request)).TTL)
        except LeaseGoneError:
            return -1

    async def revoke(self, lease_id: int) -> None:
        """End the lease and remove what hangs on it."""
        await self._call(self._leases.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease_id))

    # -- the cluster ----------------------------------------------------------------------------

    async def replace_member(self, member_id: int | None, peer_url: str) -> list[str]:
        """Remove a member (None: that was done), and add one at this address, which is to start without data.

        Returns:
            The URLs for peers of all members.
        """
        if member_id is not None:
            await self._call(self._cluster.MemberRemove, rpc.MemberRemoveRequest(ID=member_id))
        answer = await self._call(self._cluster.MemberAdd, rpc.MemberAddRequest(peerURLs=[peer_url]))
        return [url for member in answer.members for url in member.peerURLs]

    async def leads(self) -> bool | None:
        """Return whether this member leads the cluster; None: it knows of no leader."""
        status = await self._call(self._maintenance.Status, rpc.StatusRequest())
        return bool(status.leader == status.header.member_id) if status.leader else None

    # -- watching -------------------------------------------------------------------------------

    async def follow(self, key: bytes, end: bytes | None, revision: int) -> AsyncGenerator[News]:
        """Yield every change of these keys since ``revision`` (included).

        Raises:
            CompactedError: that revision is gone.
            StoreLostError: the connection broke, or etcd ended the watch (as the login has expired, say).
        """
        create = rpc.WatchCreateRequest(key=key, range_end=end or b"", start_revision=revision)
        request = rpc.WatchRequest(create_request=create)
        with self._begun(self._watch, request, None, self._token) as stream:
            try:
                while (response := await stream.read()) is not grpc.aio.EOF:
                    if response.canceled:
                        raise self._cancelled(response)
                    if response.events:
                        news = _news(response)
                        self._saw(news.next_revision - 1)
                        yield news
            except grpc.RpcError as error:
                raise self._explained(error) from None
        raise StoreLostError(f"etcd at {self.endpoint} closed a watch")

    def _cancelled(self, response: Any) -> Exception:
        if response.compact_revision:
            return CompactedError(f"compacted up to revision {int(response.compact_revision)}")
        reason = response.cancel_reason or "no reason given"
        return StoreLostError(f"etcd at {self.endpoint} cancelled a watch: {reason}")

    # -- calls ----------------------------------------------------------------------------------

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return await self._attempt(method, request, self._token)
        except grpc.RpcError as error:
            if not self.access.user or not _login_expired(error):
                raise self._explained(error) from None
        await self._log_in()
        try:
            return await self._attempt(method, request, self._token)
        except grpc.RpcError as error:
            raise self._explained(error) from None

    async def _attempt(self, method: Callable[..., Any], request: Any, token: str | None) -> Any:
        with self._begun(method, request, self.timeout_s, token) as call:
            answer = await call
        self._has_answered = True
        return answer

    @contextmanager
    def _begun(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None, token: str | None
    ) -> Iterator[Any]:
        """Begin a call, which ends with the block, or when this client is closed: gRPC calls that a cancelled task."""
        if not self._open:
            raise StoreLostError("the connection was closed")
        call = method(request, timeout=timeout_s, metadata=(("token", token),) if token else ())
        self._calls.add(call)
        cancels = _cancels()
        try:
            yield call
        except asyncio.CancelledError:
            if call in self._calls or _cancels() > cancels:
                raise
            raise StoreLostError("the connection was closed") from None
        finally:
            self._calls.discard(call)
            call.cancel()

    async def _log_in(self) -> None:
        request = rpc.AuthenticateRequest(name=self.access.user, password=self.access.password)
        try:
            self._token = (await self._attempt(self._auth.Authenticate, request, None)).token
        except grpc.RpcError as error:
            if "authentication is not enabled" not in _details(error):
                raise self._explained(error) from None

    # -- errors ---------------------------------------------------------------------------------

    def _explained(self, error: Any) -> Exception:
        """Return what went wrong, in one line."""
        code, details = error.code(), " ".join(_details(error).split())
        shown, access, status = f"etcd at {self.endpoint}", self.access, grpc.StatusCode
        if "requested lease not found" in details:
            return LeaseGoneError("the etcd lease does not exist")
        if "authentication failed" in details:
            return NotAStoreError(f"{shown} rejects user {access.user!r}: wrong name or password")
        if "user name is empty" in details or (code is status.UNAUTHENTICATED and not access.user):
            return NotAStoreError(f"{shown} requires authentication; give --etcd-user and its password")
        if code is status.PERMISSION_DENIED:
            who = f"user {access.user!r}" if access.user else "unauthenticated clients"
            return NotAStoreError(
                f"{shown} denies {who} access to the keys under {access.prefix}; grant a role with read and write "
                "permission"
            )
        if code is status.UNIMPLEMENTED:
            return NotAStoreError(
                f"{self.endpoint} is a gRPC server but does not support the etcd v3 API ({details[:120]})"
            )
        for causes, problem in _FAULTS_OF_ETCD.items():
            if any(cause in details for cause in causes):
                return StoreLostError(f"{shown} {problem.format(details[:120])}", Obstacle.EXPLAINED)
        if _timed_out(error):
            return StoreLostError(
                f"{shown} did not answer within {self.timeout_s:g} s (no majority of its members, or it is frozen or "
                "overloaded, or another program listens there)",
                Obstacle.SILENT,
            )
        if code is status.CANCELLED:
            return StoreLostError("the connection was closed")
        return self._broken(details)

    def _broken(self, details: str) -> TransportError:
        """Return the error of a connection that broke, which gRPC alone describes."""
        shown = f"etcd at {self.endpoint}"
        # The last of the causes that it lists helps a user; what precedes it names the address again.
        cause = details.rpartition("last error: ")[2].rpartition(f":{self.endpoint.port}: ")[2]
        cause = (
            cause.rpartition("OPENSSL_internal:")[2].removesuffix(": OK")[:200] or "the connection was lost"
        )
        if any(sign in details for sign in _BAD_CERTIFICATE):
            if self.secret is not None:
                return WrongKeyError(
                    f"{shown} has certificates that were not made from this agent's secret (key id "
                    f"{', '.join(self.secret.ids)}): {cause}; give all agents and all members of etcd the same "
                    "secret, or the agents --etcd-ca in place of theirs (docs/etcd.md)"
                )
            return NotAStoreError(
                f"the certificate of {shown} is not accepted: {cause}; expected one that names {self.endpoint.host}, "
                f"is valid by this machine's clock, and is issued by --etcd-ca {self.access.ca}"
            )
        if "Failed to create security handshaker" in details:
            files = filter(None, (self.access.ca, self.access.cert, self.access.key))
            return NotAStoreError(
                f"{' or '.join(map(str, files))} cannot be used for etcd: expected PEM, and the key of --etcd-cert "
                "without a passphrase"
            )
        if any(sign in details for sign in _NOT_HTTP2):
            return NotAStoreError(
                f"{self.endpoint} is not etcd ({cause}); expected etcd's client port, usually 2379"
            )
        remedy = "" if self._has_answered else f"; {self._how_to_agree()}"
        return StoreLostError(f"{shown}: {cause}{remedy}", Obstacle.CLOSED)

    def _how_to_agree(self) -> str:
        """Return what to do if the two sides have different certificates: then gRPC knows only that etcd hung up."""
        if self.secret is not None:
            return (
                "if it runs, start it with the certificates that `elastic-agent secret --certificates DIR FILE` writes "
                f"for this agent's secret (key id {self.secret.ids[0]}; docs/etcd.md)"
            )
        if self.access.tls:
            return "if it runs: without TLS it needs no --etcd-ca; with it, it must trust --etcd-cert and --etcd-key"
        return "if it runs and requires TLS, give --etcd-ca, or the --secret-file that its certificates were made from"


# -- which etcd ----------------------------------------------------------------------------------


def root_of(prefix: str) -> str:
    """Return what precedes every key of the runs below this prefix: the keys are those of :mod:`..keys`."""
    return f"{prefix.rstrip('/')}/1/"


def id_key(root: str) -> bytes:
    """Return the key of the random name of this etcd's life: another one means that its data were lost.

    The name contains an etcd lease, whose remaining time shows its age.
    """
    return f"{root}{STORE_ID}".encode()


async def store_id(client: EtcdClient, root: str) -> str:
    """Return the random name of this etcd's life; written by the first agent that connects.

    Raises:
        NotAStoreError: something else of that name is there.
    """
    key = id_key(root)
    found = await client.get(key)
    if found is None:
        await _begin_life(client, key)
        found = await client.get(key)
    name = found.value.decode("ascii", "replace") if found is not None else ""
    if not (name.isalnum() and len(name) <= 64):
        raise NotAStoreError(
            f"{key.decode()} in etcd was not written by elastic-agent: {name[:40]!r}; give another "
            "--etcd-prefix"
        )
    return name


async def _begin_life(client: EtcdClient, key: bytes) -> None:
    """Name this etcd's life, unless another agent has just done so."""
    age = await client.grant(AGE_KNOWN_S)  # when the data that were there before, if any, are gone already
    name = f"{secrets.token_hex(8)}L{age:x}"
    if not (await client.transact([is_missing(key)], [put(key, name.encode())])).succeeded:
        await client.revoke(age)


# -- the channel ----------------------------------------------------------------------------------


def _cancels() -> int:
    """Return how often the task was cancelled. A reference to it would be a cycle that keeps a connection open."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _reach(
    endpoint: Endpoint, access: EtcdAccess, timeout_s: float, secret: Secret | None
) -> tuple[str, str, Any]:
    """Return our address on the way there, the address there, and credentials (None: without TLS); blocks."""
    try:
        sock = connect(endpoint.host, endpoint.port, timeout_s)
    except UnreachableError as error:  # members on one machine differ in the port only, so errors name it
        raise UnreachableError(
            f"etcd at {endpoint}: {str(error).removeprefix(f'{endpoint.host}: ')}", error.obstacle
        ) from None
    with sock:
        local_address = local_address_towards(endpoint.host, str(sock.getsockname()[0]))
        address = str(sock.getpeername()[0])
    numeric = f"ipv6:[{address}]:{endpoint.port}" if ":" in address else f"ipv4:{address}:{endpoint.port}"
    if secret is not None:
        pem = secret.own
        return local_address, numeric, grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
    if not access.tls:
        return local_address, numeric, None
    try:
        ca, key, certificate = (
            path.read_bytes() if path is not None else None for path in (access.ca, access.key, access.cert)
        )
    except OSError as error:
        raise NotAStoreError(f"{error.filename}: {error.strerror}; expected a PEM file for etcd") from None
    return local_address, numeric, grpc.ssl_channel_credentials(ca, key, certificate)


def _calls(kind: Any, method: str, request: Any, response: Any) -> Any:
    """Return a method of etcd's as this kind of call of a channel."""
    return kind(
        f"/etcdserverpb.{method}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )


def _news(response: Any) -> News:
    written: dict[bytes, bytes] = {}
    deleted: set[bytes] = set()
    for event in response.events:
        if event.type == 0:
            written[event.kv.key] = event.kv.value
            deleted.discard(event.kv.key)
        else:
            deleted.add(event.kv.key)
            written.pop(event.kv.key, None)
    # The header may be ahead of what was sent.
    newest = max(event.kv.mod_revision for event in response.events)
    return News(newest + 1, written, frozenset(deleted))


def _details(error: Any) -> str:
    return str(error.details() or "")


def _timed_out(error: Any) -> bool:
    """Return whether the time-out was over: etcd knows it as well, and sometimes reports it first, in its own words."""
    messages = ("context deadline exceeded", "etcdserver: request timed out")
    return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or any(
        message in _details(error) for message in messages
    )


def _login_expired(error: Any) -> bool:
    return error.code() is grpc.StatusCode.UNAUTHENTICATED or any(
        message in _details(error) for message in _EXPIRED_LOGIN
    )
