"""Any record that is in bounds, for property-based tests."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from elastic_agent.protocol.records import (
    RECORD_VERSION,
    Address,
    Budget,
    Failure,
    FailureKind,
    Fingerprint,
    History,
    Lease,
    Member,
    Phase,
    Plan,
    Policy,
    Refusal,
    Seat,
    State,
    World,
)
from elastic_agent.values import LONGEST_LEASE_S, SHORTEST_LEASE_S

names = st.text("abzAZ0129._:@+-", min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))
texts = st.text(max_size=20)
counts = st.integers(0, 2**31)
generations = st.integers(0, 2**53)
seconds = st.floats(0, 1e7)
leases_s = st.floats(SHORTEST_LEASE_S, LONGEST_LEASE_S)
addresses = st.builds(Address, st.text(min_size=1, max_size=20), st.integers(1, 65535))
signatures = st.text("0123456789abcdef", max_size=64)
failures = st.builds(
    Failure,
    st.sampled_from(FailureKind),
    texts,
    tail=texts,
    slot=st.none() | counts,
    returncode=st.none() | st.integers(-255, 255),
    unreachable_node=st.none() | names,
    signature=signatures,
    progressed=st.booleans(),
    stalled_s=seconds,
)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    low, high = sorted(draw(st.tuples(st.integers(1, 65536), st.integers(1, 65536))))
    times = (draw(seconds), draw(seconds), draw(seconds), draw(seconds))
    more = {"restart_window_s": draw(seconds), "restart_backoff_s": draw(seconds)}
    more |= {"desired_nodes": draw(st.integers(0, 65536)), "desired_wait_s": draw(seconds)}
    return Policy(low, high, draw(counts), draw(leases_s), *times, **more)


@st.composite
def budgets(draw: st.DrawFn, charged: int) -> Budget:
    return Budget(draw(st.integers(0, charged)), draw(seconds), draw(counts), draw(signatures))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    rank = 0
    seats = []
    for node in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        seats.append(Seat(node, draw(names), draw(names), draw(st.integers(1, 64)), rank, draw(texts)))
        rank += seats[-1].slots
    return World(draw(generations), tuple(seats), draw(addresses), seats[0].node_id)


orders = st.lists(names, max_size=4).map(tuple)


@st.composite
def some_histories(draw: st.DrawFn) -> History:
    sealed = draw(st.none() | worlds())
    generation = draw(st.integers(sealed.generation if sealed is not None else 0, 2**53))
    outcome = draw(st.none() | st.sampled_from([phase for phase in Phase if phase.is_terminal]))
    charged = draw(counts)
    told = History(generation, sealed, charged, draw(orders), outcome, draw(st.booleans()))
    return msgspec.structs.replace(told, budget=draw(budgets(charged)))


histories = some_histories()
members = st.builds(
    Member,
    version=st.just(RECORD_VERSION),
    node_id=names,
    incarnation=names,
    address=names,
    slots=st.integers(1, 65536),
    state=st.sampled_from(State),
    generation=generations,
    policy=policies(),
    bootstrap=st.none() | addresses,
    failure=st.none() | failures,
    stop_s=seconds,
    replaces=orders,
    preferred_rank=st.none() | counts,
    role=texts,
    fingerprint=st.builds(Fingerprint, texts, texts, texts, texts),
    history=st.none() | histories,
)
some_plans = st.builds(
    Plan,
    format=st.just(RECORD_VERSION),
    version=st.integers(1, 2**53),
    phase=st.sampled_from(Phase),
    generation=generations,
    reason=texts,
    policy=policies(),
    world=st.none() | worlds(),
    uncleared=worlds().map(lambda one: one.seats),
    charged=counts,
    failure=st.none() | failures,
    failed_node=st.none() | names,
    free=st.booleans(),
    succeeded=orders,
    order=orders,
    refused=st.dictionaries(names, st.builds(Refusal, texts, st.booleans()), max_size=3),
    losses=st.dictionaries(names, counts, max_size=3),
    start_failures=st.dictionaries(names, counts, max_size=3),
    avoid_bootstrap=orders,
)
plans = some_plans.flatmap(
    lambda plan: budgets(plan.charged).map(lambda budget: msgspec.structs.replace(plan, budget=budget))
)
leases = st.builds(Lease, names, leases_s, counts, st.booleans())
records = members | leases | plans | worlds() | histories
