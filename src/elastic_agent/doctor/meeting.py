"""Where the machines of an examination meet: at the run's endpoint, beside the runs that use it.

All agree on the machines that take part, the members: the first proposal counts. It is made by a machine that sees
as many others as the settings of all of them require, or that has waited long enough. A machine that comes too late
for one round waits for the next one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elastic_agent.transport import Table

from .records import Attendance, decode_all

R = TypeVar("R", bound=Struct)

FOLDER = "elastic-agent-doctor/3"
POLL_S = 0.2
GONE_S = 4.0
"""A machine that has written nothing for this long is not waiting any more."""
EARLY_S = 2.0
"""After this time it is shown for which machines the others wait."""
SETTLE_S = 15.0
"""How long to wait for more once the smallest number of nodes is there."""

_MEMBERS = "members"


class Meeting:
    """One machine's place in it."""

    def __init__(self, table: Table, attendance: Attendance) -> None:
        """Prepare to meet the others.

        Args:
            table: of a folder other than that of the runs; closed with the meeting.
            attendance: this machine, for the others.
        """
        self.id = secrets.token_hex(6)
        self.members: tuple[str, ...] = ()
        """The ids of all machines that take part, in the same order on all of them; set by :meth:`join`."""
        self.attendances: dict[str, Attendance] = {}
        """Of the members, by id, in the same order."""
        self.present: tuple[str, ...] = (attendance.machine,)
        """The names of those that wait."""
        self.expected = attendance.most
        """How many machines the settings of those that wait require."""
        self.least = attendance.least
        """How many they require at least."""
        self._table = table
        self._attendance = attendance
        self._round = 0
        self._changed_s: dict[str, tuple[int, float]] = {}

    async def join(self, wait_s: float, show: Callable[[str], None]) -> None:
        """Wait until the members are known; ``show`` is called with one line when that takes long.

        Raises:
            StoreLostError: the store does not answer any more.
        """
        begun_s = arrived_s = time.monotonic()
        shown = ""
        while not (members := await self._decided()):
            now_s = time.monotonic()
            alive = await self._look(now_s)
            names = tuple(sorted(attendance.machine for attendance in alive.values()))
            if names != self.present:
                self.present, arrived_s = names, now_s
            self.expected = max(attendance.most for attendance in alive.values())
            self.least = max(attendance.least for attendance in alive.values())
            if self._is_enough(len(alive), now_s - begun_s, now_s - arrived_s, wait_s):
                await self._table.swap(self._decision(), None, " ".join(sorted(alive)).encode())
                continue
            line = self._waiting_for()
            if now_s - begun_s > EARLY_S and line != shown:
                shown = line
                show(line)
            await asyncio.sleep(POLL_S)
        attendances = await self._read(_MEMBERS, Attendance)
        self.members = members
        self.attendances = {member: attendances[member] for member in members if member in attendances}

    async def _decided(self) -> tuple[str, ...]:
        """Return the members, if this machine is among them; goes to the first round that is not decided yet."""
        self._round = 0
        while data := (await self._table.read([self._decision()])).get(self._decision()):
            members = tuple(data.decode("ascii", "replace").split())
            if self.id in members:
                return members
            self._round += 1
        return ()

    async def _look(self, now_s: float) -> dict[str, Attendance]:
        """Write that this machine waits, and return those that do, by id."""
        self._attendance = replace(self._attendance, beat=self._attendance.beat + 1)
        await self._write(_MEMBERS, self._attendance)
        found = await self._read(_MEMBERS, Attendance)
        found[self.id] = self._attendance
        for machine, attendance in found.items():
            before = self._changed_s.get(machine)
            if before is None:
                # Perhaps written long ago: it counts as soon as it is written again.
                self._changed_s[machine] = (attendance.beat, -GONE_S)
            elif before[0] != attendance.beat:
                self._changed_s[machine] = (attendance.beat, now_s)
        return {
            machine: attendance
            for machine, attendance in found.items()
            if machine == self.id or now_s - self._changed_s[machine][1] < GONE_S
        }

    def _is_enough(self, count: int, waited_s: float, settled_s: float, wait_s: float) -> bool:
        if waited_s >= wait_s or count >= self.expected:
            return True
        return count >= max(self.least, 2) and settled_s >= SETTLE_S

    def _waiting_for(self) -> str:
        missing, here = self.expected - len(self.present), ", ".join(self.present)
        return f"waiting for {missing} of {self.expected} machines; here: {here}. Run the same command on the others"

    async def exchange(self, phase: str, record: R, timeout_s: float) -> dict[str, R]:
        """Give the other members this machine's record; return the records of all members that came in time, by id.

        Raises:
            StoreLostError: the store does not answer any more.
        """
        await self._write(phase, record)
        until_s = time.monotonic() + timeout_s
        while True:
            found = await self._read(phase, type(record))
            theirs = {member: found[member] for member in self.members if member in found}
            if len(theirs) == len(self.members) or time.monotonic() > until_s:
                return theirs
            await asyncio.sleep(POLL_S / 4)

    async def leave(self) -> None:
        """Have the first member remove what was exchanged, once all have read it."""
        if self.id == self.members[0]:
            await self._table.delete((), f"{self._round}/")

    async def _write(self, phase: str, record: Struct) -> None:
        await self._table.put(f"{self._round}/{phase}/{self.id}", msgspec.json.encode(record))

    async def _read(self, phase: str, kind: type[R]) -> dict[str, R]:
        """Return the records of this phase, by the id of the machine."""
        folder = f"{self._round}/{phase}/"
        found = await self._table.read_folders(folder)
        return decode_all(kind, {key.removeprefix(folder): data for key, data in found.items()})

    def _decision(self) -> str:
        return f"{self._round}/decision"

    def close(self) -> None:
        """Release the connection."""
        self._table.close()
