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

from .member import ANSWER_S, FOLDER, PROGRAM, Member

DISK_S = 30.0
LOOK_S = 5.0
IF_LOST = (
    "if a majority has lost its data, the store is lost: stop all agents, remove the folder "
    f"{FOLDER} in every state directory (elastic-agent settings shows it), and start them again: the run goes on from "
    "its last checkpoint"
)
RETRY_MIN_S, RETRY_MAX_S = 0.2, 2.0


class Hosting:
    """The members of a cluster, of which this process supervises those of this machine that no other one does."""

    def __init__(
        self, cluster: Endpoint, state_dir: Path, secret: Secret | None, local_addr: str | None
    ) -> None:
        """Start nothing, look up names; ``local_addr``: this machine's, if that is given.

        Raises:
            ValueError: this machine is to host a member, and etcd is not installed.
        """
        self._members = [Member(own, cluster, state_dir, secret, local_addr) for own in cluster.members]
        self._secret = secret
        self._tasks: list[asyncio.Task[None]] = []
        self._told = ""
        self._log = get_logger()
        self.own: int | None = None
        """The number of the first member on this machine; None: none is, as far as names resolve."""
        with contextlib.suppress(UnreachableError):  # dialling it says so
            here = (number for number, member in enumerate(self._members) if member.is_here())
            self.own = next(here, None)
        if shutil.which(PROGRAM) is None and self.own is not None:
            raise ValueError(
                f"this machine is to host a member of etcd, and the command `{PROGRAM}` is not installed; install it "
                "(Debian, Ubuntu: apt install etcd-server)"
            )

    @property
    def is_supervising(self) -> bool:
        """True if this process supervises a member."""
        return any(member.is_supervised for member in self._members)

    @property
    def processes(self) -> list[int]:
        """The processes of the members of this machine."""
        return [pid for member in self._members if (pid := member.process()) is not None]

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
            await _aside(member.free_address)  # what runs there may be the member that would be replaced
            has_data = await _aside(lambda: member.has_data)
            cluster = None if has_data else await self._cluster_to_join(member)
            await _aside(lambda: member.start(cluster))
            self._log.info(f"hosting the etcd member {member.own}")
        while (pid := await _aside(member.process)) is not None:
            await _aside(partial(await_exit, pid, LOOK_S))
            await self._look_for_leader(member)
        words = await _aside(member.last_words)
        has_data = await _aside(lambda: member.has_data)
        hint = f"; if its data are damaged, remove {member.data}: the others take it back" if has_data else ""
        self._tell(f"etcd on this machine ({member.own}) has ended{words}; starting it again{hint}")

    async def _look_for_leader(self, member: Member) -> None:
        """Name the other members that this one may not reach, if it knows of no leader."""
        if await self._role(member) in ("leads", "follows") or await _aside(member.process) is None:
            return
        silent = [str(each.peer) for each in self._members if each is not member and not await _runs(each)]
        if silent:
            self._tell(
                f"etcd on this machine ({member.own}) knows of no leader, and there is no answer from "
                f"{', '.join(silent)}; start the same command there, and open this port between the machines"
            )

    async def _cluster_to_join(self, member: Member) -> list[str] | None:
        """Return the members (URLs for peers) of the cluster that a member without data joins; None: a new one.

        If the others know it as one that has been up, its data were lost: it is replaced by a new member.

        Raises:
            TransportError: there is a cluster, which cannot do that now, or there may be one.
        """
        problems, is_known = [], False
        for other in self._members:
            try:
                known = await _aside(other.known_members) if other is not member else None
                if known is None:
                    continue  # it does not run
                own = next((each for each in known if member.peer_url in each["peerURLs"]), {})
                if own.get("name") and not own.get("clientURLs"):
                    return None  # the others began without it
                is_known = True
                if own and not own.get("name"):  # it was replaced already
                    return [url for each in known for url in each["peerURLs"]]
                with contextlib.closing(await self._dial(other)) as client:
                    return await client.replace_member(own.get("id"), member.peer_url)
            except TransportError as error:
                problems.append(str(error))
        if is_known:
            raise TransportError(
                f"it has lost its data, and cannot join again yet: {problems[-1]}; {IF_LOST}"
            )
        if problems:
            raise TransportError(f"it has no data, and another member may have: {problems[-1]}")
        return None

    async def _role(self, member: Member) -> str:
        try:
            with contextlib.closing(await self._dial(member)) as client:
                return {True: "leads", False: "follows", None: "knows of no leader"}[await client.leads()]
        except TransportError as error:
            return str(error)

    async def roles(self) -> dict[str, str]:
        """Return of each member, by its host, that it ``leads`` or ``follows``, or what is wrong with it."""
        found = await asyncio.gather(*map(self._role, self._members))
        return {member.own.host: text for member, text in zip(self._members, found, strict=True)}

    async def _dial(self, member: Member) -> EtcdClient:
        return await EtcdClient.dial(member.own, EtcdAccess(), ANSWER_S, self._secret)

    def _tell(self, text: str) -> None:
        """Log it, unless that was said last."""
        if text != self._told:
            self._log.warning(text)
        self._told = text


async def _runs(member: Member) -> bool:
    try:
        return await _aside(member.known_members) is not None
    except TransportError:
        return False


async def _aside(work: Callable[[], T]) -> T:
    return await run_abandonable(work, DISK_S)


async def serve(cluster: Endpoint, state_dir: Path, secret: Secret | None) -> bool:
    """Host the members of this machine until a signal to stop, and return True.

    Raises:
        CannotServeError: none is on this machine, or etcd is not installed.
    """
    hosting, stop = Hosting(cluster, state_dir, secret, None), signals_to_stop()
    if hosting.own is None:
        raise CannotServeError(f"none of {cluster} is this machine; run elastic-agent serve on each of them")
    manager = SystemdNotifier.taken_from(os.environ)
    hosting.begin()
    get_logger().info(f"serving at {cluster}", state_dir=str(state_dir))
    manager.notify(READY)
    await until_one_ends(stop.get(), *([show_life(manager)] if manager.watchdog_s is not None else []))
    manager.notify(STOPPING)
    await hosting.end()
    return True
