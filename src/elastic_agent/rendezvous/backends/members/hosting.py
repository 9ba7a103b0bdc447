"""Keeps the etcd members of this machine up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic_agent.files import with_remedy
from elastic_agent.linux import await_exit
from elastic_agent.logs import get_logger
from elastic_agent.rendezvous.backends.c10d.store_server import CannotServeError, show_life, signals_to_stop
from elastic_agent.rendezvous.waits import T, back_offs, until_one_ends
from elastic_agent.sd_notify import READY, STOPPING, SystemdNotifier
from elastic_agent.transport import Secret, TransportError, UnreachableError, run_abandonable
from elastic_agent.transport.etcd import EtcdClient
from elastic_agent.values import Endpoint, EtcdAccess

from .member import PROGRAM, Member

ANSWER_S, DISK_S = 1.0, 30.0
RETRY_MIN_S, RETRY_MAX_S = 0.2, 2.0


class Hosting:
    """The members of a cluster, of which this process supervises those of this machine that no other one does."""

    def __init__(
        self, cluster: Endpoint, state_dir: Path, secret: Secret | None, local_addr: str | None
    ) -> None:
        """Start nothing; ``local_addr``: this machine's, if that is given.

        Raises:
            ValueError: this machine is to host a member, and etcd is not installed.
        """
        self._members = [Member(own, cluster, state_dir, secret, local_addr) for own in cluster.members]
        self._secret = secret
        self._tasks: list[asyncio.Task[None]] = []
        self._told = ""
        self._log = get_logger()
        if shutil.which(PROGRAM) is None and self.is_any_here:
            raise ValueError(
                f"this machine is to host a member of etcd, and the command `{PROGRAM}` is not installed; install it "
                "(Debian, Ubuntu: apt install etcd-server)"
            )

    @property
    def is_any_here(self) -> bool:
        """Whether a member is on this machine, as far as names resolve; blocks."""
        with contextlib.suppress(UnreachableError):  # dialling it says so
            return any(member.is_here() for member in self._members)
        return False

    @property
    def is_supervising(self) -> bool:
        """Whether this process supervises a member."""
        return any(member.is_supervised for member in self._members)

    def begin(self) -> None:
        """Host what is on this machine from now on, in the event loop; without effect the second time."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._host(member), name="etcd") for member in self._members]

    async def end(self) -> None:
        """End the members that this process supervises."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members:
            await _aside(member.stop)

    async def _host(self, member: Member) -> None:
        """Keep this member up, if it is on this machine and no other process does."""
        pauses_s = back_offs(RETRY_MIN_S, RETRY_MAX_S)
        while True:
            try:
                if not await _aside(member.is_here):
                    return
                await _aside(member.supervise)
                await self._live(member)
            except BlockingIOError:
                pass  # another agent supervises it
            except (OSError, TransportError) as error:
                self._tell(f"cannot run etcd on this machine ({member.own}): {with_remedy(error)}")
            await asyncio.sleep(next(pauses_s))

    async def _live(self, member: Member) -> None:
        """Start the member if it does not run, and wait until it has ended."""
        if await _aside(member.process) is None:
            await _aside(
                member.free_address
            )  # first: what runs there may be the member that would be replaced
            state = "new" if await _aside(lambda: member.has_data) else await self._state_to_start_in(member)
            await _aside(lambda: member.start(state))
            self._log.info(f"hosting the etcd member {member.own}")
        while (pid := await _aside(member.process)) is not None:
            await _aside(partial(await_exit, pid, DISK_S / 2))
        self._tell(
            f"etcd on this machine ({member.own}) has ended{await _aside(member.last_words)}; starting it again. If "
            f"its data are damaged or of another cluster, remove {member.data}: the others let it join again"
        )

    async def _state_to_start_in(self, member: Member) -> str:
        """Return etcd's ``--initial-cluster-state`` for a member without data.

        If the others know it as one that has been up, its data were lost: it is replaced by a new member.

        Raises:
            TransportError: there is a cluster, which cannot do that now; it may have no majority.
        """
        refusal: TransportError | None = None
        for other in self._members:
            try:
                with contextlib.closing(await self._dial(other)) as client:
                    known = await client.members()
                    own = next((each for each in known if member.peer_url in each.peerURLs), None)
                    if own is not None and own.name and not own.clientURLs:
                        return "new"  # a majority began without it
                    try:
                        if own is None or own.name:
                            await client.replace_member(own.ID if own is not None else None, member.peer_url)
                        return "existing"
                    except TransportError as error:
                        refusal = error
            except TransportError:
                continue  # it does not run, as this one, or is just starting
        if refusal is not None:
            raise TransportError(f"it has lost its data, and cannot join again yet: {refusal}")
        return "new"

    async def roles(self) -> dict[str, str]:
        """Return of each member, by its host, that it ``leads`` or ``follows``, or what is wrong with it."""

        async def role(member: Member) -> str:
            try:
                with contextlib.closing(await self._dial(member)) as client:
                    return {True: "leads", False: "follows", None: "knows of no leader"}[await client.leads()]
            except TransportError as error:
                return str(error)

        found = await asyncio.gather(*map(role, self._members))
        return {member.own.host: text for member, text in zip(self._members, found, strict=True)}

    async def _dial(self, member: Member) -> EtcdClient:
        return await EtcdClient.dial(member.own, EtcdAccess(), ANSWER_S, self._secret)

    def _tell(self, text: str) -> None:
        """Log it, unless that was said last."""
        if text != self._told:
            self._log.warning(text)
        self._told = text


async def _aside(work: Callable[[], T]) -> T:
    return await run_abandonable(work, DISK_S)


async def serve(cluster: Endpoint, state_dir: Path, secret: Secret | None) -> bool:
    """Host the members of this machine until a signal to stop, and return True.

    Raises:
        CannotServeError: none is on this machine, or etcd is not installed.
    """
    hosting, stop = Hosting(cluster, state_dir, secret, None), signals_to_stop()
    if not hosting.is_any_here:
        raise CannotServeError(f"none of {cluster} is this machine; run elastic-agent serve on each of them")
    manager = SystemdNotifier.taken_from(os.environ)
    hosting.begin()
    get_logger().info(f"serving at {cluster}", state_dir=str(state_dir))
    manager.notify(READY)
    await until_one_ends(stop.get(), *([show_life(manager)] if manager.watchdog_s is not None else []))
    manager.notify(STOPPING)
    await hosting.end()
    return True
