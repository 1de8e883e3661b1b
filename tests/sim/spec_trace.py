"""docs/spec/Replication.tla as Python: random walks far beyond TLC's bounds, and a checker of recorded steps.

`TraceChecker` replays steps that are named as the spec names them, `("Push", "a", "b")`: each must be one that the spec
allows in the state that the steps before it led to, and every invariant must hold after it. The random walks of
tests/unit/replication use it; the simulation of whole nodes checks the invariants on the nodes themselves.

    checker = TraceChecker(Spec(replicas=("a", "b", "c"), leader="a"))
    checker.step("Become", "a")
    checker.step("Write", "a", 0xCAFE)          # any value that tells two batches apart
    checker.step("Push", "a", "b", 3)           # three entries, one Push each; none left to take: a heartbeat
    checker.step("Commit", "a", 1)              # up to the log end 1
    checker.step("Shrink", "a", "c")
    checker.step("EtcdApply", ("a", 1, 1))      # a request is named by (leader, epoch, version it compares)
    checker.step("Reply", ("a", 1, 1))
    checker.expect("b", log_end=1, promise=1)   # and what is known of the real node has to agree

Everything that is not given a bound is unbounded, all faults are on: a trace is not a search. `Spec.steps` lists what
may happen next, which the random walks of tests/unit/replication/test_spec_model.py use.

An action is a method with the spec's name, returns the next state and raises NotAStep where the spec's guard says no.
The order of definitions and the names of fields are the spec's too. Two things are written differently, with the same
meaning: NotLeading is None, and `acked` is the sequence of entries acknowledged first under their log id, beside
`forks`, the ones acknowledged later with another content.
"""

# ruff: noqa: E741  `l` is the spec's name for a leader.
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

Node = str
Entry = tuple[int, Hashable]  # leader epoch, value
Step = tuple[Any, ...]  # name of the action, its arguments
FAULTS = frozenset({"AllowKill", "AllowWipe", "AllowUnknown", "AllowRenew", "AllowHandOver"})
NO_BOUND = 1 << 62


class NotAStep(Exception):
    """The spec does not allow this action in this state."""


class InvariantBroken(AssertionError):
    """The spec allows the action, and something that was acknowledged is lost, or may get lost."""


@dataclass(frozen=True, slots=True)
class Metadata:
    leader: Node
    epoch: int
    isr: frozenset[Node]
    stale: frozenset[Node]
    version: int


@dataclass(frozen=True, slots=True)
class Leading:
    """What a leader believes of its leadership."""

    epoch: int
    isr: frozenset[Node]
    maximal: frozenset[Node]
    version: int
    committed: int
    epoch_start: int
    waiting: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A compare-and-set of a leader that is under way."""

    leader: Node
    epoch: int
    isr: frozenset[Node]
    version: int
    added: Node | None
    registration: int
    heir: Node | None = None
    status: str = "sent"


@dataclass(frozen=True, slots=True)
class Replica:
    registration: int
    log: tuple[Entry, ...]
    durable: int
    synced: int
    promise: int
    up: bool
    leading: Leading | None
    match: dict[Node, int]  # as this node knows the others
    seen: dict[Node, int]

    def key(self) -> Hashable:
        return (
            *(self.registration, self.log, self.durable, self.synced, self.promise, self.up, self.leading),
            *(tuple(self.match.values()), tuple(self.seen.values())),
        )


@dataclass(frozen=True, slots=True)
class State:
    metadata: Metadata
    replicas: dict[Node, Replica]
    requests: frozenset[Request]
    acked: tuple[Entry, ...]
    forks: frozenset[tuple[int, Entry]]
    next_value: int
    crashes: int
    lossy: frozenset[Node]

    def key(self) -> Hashable:
        """Equal for equal states and hashable."""
        replicas = tuple(r.key() for r in self.replicas.values())
        return (
            *(self.metadata, replicas, self.requests, self.acked, self.forks),
            *(self.next_value, self.crashes, self.lossy),
        )

    def having(self, node: Node, **changes: Any) -> State:
        """This state with other values in one replica."""
        return replace(self, replicas={**self.replicas, node: replace(self.replicas[node], **changes)})


def need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotAStep(otherwise)


@dataclass(frozen=True)
class Spec:
    """The constants, the actions and the invariants."""

    replicas: tuple[Node, ...] = ("a", "b", "c")
    leader: Node = "a"  # whom the first record names
    min_isr: int = 2
    fsync_ack: bool = True
    max_epoch: int = NO_BOUND
    max_value: int = NO_BOUND
    max_crash: int = NO_BOUND
    max_version: int = NO_BOUND
    on: frozenset[str] = FAULTS  # which Allow... and Mut... are TRUE

    def initial(self) -> State:
        nobody = dict.fromkeys(self.replicas, 0)
        fresh = Replica(
            registration=1, log=(), durable=0, synced=0, promise=0, up=True, leading=None, match=nobody, seen=nobody
        )
        metadata = Metadata(self.leader, epoch=1, isr=frozenset(self.replicas), stale=frozenset(), version=1)
        return State(
            metadata=metadata,
            replicas=dict.fromkeys(self.replicas, fresh),
            requests=frozenset(),
            acked=(),
            forks=frozenset(),
            next_value=1,
            crashes=0,
            lossy=frozenset(),
        )

    # Guards that several actions share.

    def leads(self, s: State, node: Node) -> Leading:
        leading = s.replicas[node].leading
        if leading is None or not s.replicas[node].up:
            raise NotAStep(f"{node} does not lead")
        return leading

    def may_ask(self, s: State, node: Node) -> Leading:
        leading = self.leads(s, node)
        need(not leading.waiting, f"{node} waits for the outcome of another request")
        need(s.metadata.version < self.max_version, "the bound of versions is reached")
        return leading

    def enough_members(self, leading: Leading) -> bool:
        return "MutBelowMinIsr" in self.on or len(leading.isr) >= self.min_isr

    def floor_kept(self, isr: frozenset[Node]) -> bool:
        return "MutNoFloor" in self.on or len(isr) >= self.min_isr

    def may_lose(self, s: State, node: Node) -> bool:
        return len(s.lossy | {node}) < self.min_isr

    def common_prefix(self, a: Sequence[Entry], b: Sequence[Entry]) -> int:
        shorter = min(len(a), len(b))
        if a[:shorter] == b[:shorter]:
            return shorter
        numbers_alone = "AllowFailedWrite" in self.on
        for n in range(shorter):
            if a[n][0] != b[n][0] or (a[n] != b[n] and not numbers_alone):
                return n
        return shorter

    # Data.

    def Write(self, s: State, l: Node, value: Hashable = None) -> State:
        leading = self.leads(s, l)
        need(s.next_value <= self.max_value, "the bound of values is reached")
        need(self.enough_members(leading), f"{l} knows an ISR below min_isr")
        entry: Entry = (leading.epoch, s.next_value if value is None else value)
        return replace(s.having(l, log=(*s.replicas[l].log, entry)), next_value=s.next_value + 1)

    def Push(self, s: State, l: Node, f: Node) -> State:
        need(l != f, "a push to itself")
        leading, leader, follower = self.leads(s, l), s.replicas[l], s.replicas[f]
        need(follower.up, f"{f} is down")
        no_promise = "MutNoPromise" in self.on
        need(no_promise or leading.epoch >= follower.promise, f"{f} promised epoch {follower.promise}")
        other = follower.leading
        need(other is None or other.epoch < leading.epoch, f"{f} leads the same epoch or a later one")
        have = len(follower.log)
        if "MutDuplicateByPosition" in self.on:
            log = (*follower.log, leader.log[have]) if have < len(leader.log) else follower.log
        else:
            common = self.common_prefix(leader.log, follower.log)
            log = follower.log[:common] + leader.log[common : common + 1]
        changed = log != follower.log
        synced = len(log) if changed else follower.synced
        s = s.having(
            f,
            log=log,
            synced=synced,
            durable=len(log) if self.fsync_ack and changed else min(follower.durable, len(log)),
            promise=follower.promise if no_promise else leading.epoch,
            leading=None,
        )
        known = min(synced if self.fsync_ack else len(log), len(leader.log))
        match, seen = {**leader.match, f: known}, {**leader.seen, f: follower.registration}
        return s.having(l, match=match, seen=seen)

    def Sync(self, s: State, r: Node) -> State:
        replica = s.replicas[r]
        need(replica.up, f"{r} is down")
        need(replica.synced < len(replica.log), f"{r} has nothing to sync")
        return s.having(r, durable=len(replica.log), synced=len(replica.log))

    def Commit(self, s: State, l: Node) -> State:
        leading, leader = self.leads(s, l), s.replicas[l]
        need(leading.committed < len(leader.log), f"{l} has nothing to commit")
        n = leading.committed + 1
        lacking = sorted(m for m in leading.maximal - {l} if leader.match[m] < n)
        need(not lacking, f"{lacking} of the maximal ISR have not acknowledged {n}")
        need(self.enough_members(leading), f"{l} knows an ISR below min_isr")
        need(not self.fsync_ack or leader.synced >= n, f"{l} has not synced {n} itself")
        entry = leader.log[n - 1]
        s = s.having(l, leading=replace(leading, committed=n))
        if n > len(s.acked):
            return replace(s, acked=(*s.acked, entry))
        return s if s.acked[n - 1] == entry else replace(s, forks=s.forks | {(n, entry)})

    # Election and the ISR.

    def Elect(self, s: State, n: Node, keep: bool) -> State:
        m = s.metadata
        need(m.epoch < self.max_epoch and m.version < self.max_version, "a bound is reached")
        need(n != m.leader or s.replicas[n].leading is None, f"{n} leads already")
        need(n in m.isr - m.stale, f"{n} is not in the ISR with the log_uid that the ISR names")
        rest = m.isr - {m.leader}
        isr = m.isr if m.leader == n or keep or not self.floor_kept(rest) else rest
        return replace(s, metadata=Metadata(n, m.epoch + 1, isr, m.stale & isr, m.version + 1))

    def FenceIsr(self, s: State, f: Node) -> State:
        m = s.metadata
        need(not s.replicas[f].up, f"{f} is up")
        need(f in m.isr and f != m.leader, f"{f} leads or is no member")
        need(m.version < self.max_version, "the bound of versions is reached")
        isr = m.isr - {f}
        need(self.floor_kept(isr), "the ISR would fall below the floor")
        return replace(s, metadata=replace(m, isr=isr, stale=m.stale & isr, version=m.version + 1))

    def Become(self, s: State, n: Node) -> State:
        m, replica = s.metadata, s.replicas[n]
        need(replica.up, f"{n} is down")
        need(m.leader == n and n not in m.stale, f"{n} is not the leader that the record names, or its log_uid is not")
        need(replica.leading is None or replica.leading.epoch < m.epoch, f"{n} leads epoch {m.epoch} already")
        resume = "MutResumeEpoch" in self.on and replica.promise == m.epoch
        need(replica.promise < m.epoch or resume, f"{n} promised epoch {replica.promise} before")
        leading = Leading(m.epoch, m.isr, m.isr, m.version, committed=0, epoch_start=len(replica.log), waiting=False)
        nobody = dict.fromkeys(self.replicas, 0)
        return s.having(n, leading=leading, promise=m.epoch, match=nobody, seen=nobody)

    def Hear(self, s: State, r: Node) -> State:
        m, replica = s.metadata, s.replicas[r]
        need(replica.up and replica.leading is None, f"{r} is down, or leads")
        need(m.leader != r, f"{r} is elected")
        need(replica.promise < m.epoch, f"{r} promised epoch {replica.promise} before")
        return s.having(r, promise=m.epoch)

    def Refresh(self, s: State, l: Node) -> State:
        m, leading = s.metadata, self.leads(s, l)
        need(not leading.waiting, f"{l} waits for the outcome of a request")
        need(m.leader == l and m.epoch == leading.epoch, "another leader or epoch")
        need(m.version > leading.version, "nothing new")
        return s.having(l, leading=replace(leading, isr=m.isr, maximal=m.isr, version=m.version))

    def ask(self, s: State, l: Node, isr: frozenset[Node], added: Node | None, maximal: frozenset[Node]) -> State:
        leading = self.leads(s, l)
        registration = 0 if added is None else s.replicas[l].seen[added]
        request = Request(l, leading.epoch, isr, leading.version, added, registration)
        s = s.having(l, leading=replace(leading, waiting=True, maximal=maximal))
        return replace(s, requests=s.requests | {request})

    def Shrink(self, s: State, l: Node, f: Node) -> State:
        leading = self.may_ask(s, l)
        rest = leading.isr - {f}
        need(f != l and f in leading.isr, f"{f} leads or is no member")
        need(self.floor_kept(rest), "the ISR would fall below the floor")
        return self.ask(s, l, rest, None, rest if "MutProposedIsr" in self.on else leading.maximal)

    def caught_up(self, s: State, l: Node, f: Node) -> bool:
        leading, leader = self.leads(s, l), s.replicas[l]
        return leader.match[f] >= max(leading.committed, leading.epoch_start) and leader.seen[f] != 0

    def Expand(self, s: State, l: Node, f: Node) -> State:
        leading = self.may_ask(s, l)
        need(f != l and (f not in leading.isr or f in s.metadata.stale), f"{f} is a member already")
        need(self.caught_up(s, l, f), f"{f} has not caught up")
        maximal = leading.maximal if "MutProposedIsr" in self.on else leading.maximal | {f}
        return self.ask(s, l, leading.isr | {f}, f, maximal)

    def Swap(self, s: State, l: Node, old: Node, new: Node) -> State:
        leading = self.may_ask(s, l)
        need(new not in leading.isr and old in leading.isr and old != l, "no such swap")
        need(self.caught_up(s, l, new), f"{new} has not caught up")
        return self.ask(s, l, (leading.isr - {old}) | {new}, new, leading.maximal | {new})

    def HandOver(self, s: State, l: Node, n: Node, keep: bool) -> State:
        need("AllowHandOver" in self.on, "nobody hands over here")
        leading, leader = self.may_ask(s, l), s.replicas[l]
        need(leading.epoch < self.max_epoch, "the bound of epochs is reached")
        need(n != l and n in leading.isr - s.metadata.stale, f"{n} is no member with the log_uid that the ISR names")
        need(leader.seen[n] != 0, f"{l} has not heard of {n}")
        need(leading.committed == len(leader.log), f"{l} has something that is not committed")
        rest = leading.isr - {l}
        isr = leading.isr if keep or not self.floor_kept(rest) else rest
        request = Request(l, leading.epoch, isr, leading.version, None, leader.seen[n], heir=n)
        s = s.having(l, leading=replace(leading, waiting=True))
        return replace(s, requests=s.requests | {request})

    def request(self, s: State, which: Request | tuple[Node, int, int]) -> Request:
        if isinstance(which, Request):
            need(which in s.requests, f"no such request: {which}")
            return which
        for request in s.requests:
            if (request.leader, request.epoch, request.version) == which:
                return request
        raise NotAStep(f"no request (leader, epoch, version) = {which} is under way")

    def EtcdApply(self, s: State, which: Request | tuple[Node, int, int]) -> State:
        c, m = self.request(s, which), s.metadata
        need(c.status == "sent", f"it was {c.status} before")
        others = s.requests - {c}
        named = c.heir or c.added
        same_life = named is None or s.replicas[named].registration == c.registration
        if c.version != m.version or not (same_life or "MutAnyRegistration" in self.on):
            return replace(s, requests=others | {replace(c, status="refused")})
        added = frozenset(() if c.added is None else (c.added,))
        metadata = replace(m, isr=c.isr, stale=(m.stale - added) & c.isr, version=m.version + 1)
        if c.heir is not None:
            metadata = replace(metadata, leader=c.heir, epoch=c.epoch + 1)
        back = frozenset(node for node in added if s.replicas[node].up)
        return replace(s, metadata=metadata, requests=others | {replace(c, status="ok")}, lossy=s.lossy - back)

    def Reply(self, s: State, which: Request | tuple[Node, int, int], stay: bool = False) -> State:
        c = self.request(s, which)
        need(c.status != "sent", "it has no outcome yet")
        s = replace(s, requests=s.requests - {c})
        at = s.replicas[c.leader].leading
        if at is None or not at.waiting or (at.epoch, at.version) != (c.epoch, c.version):
            return s
        if c.status == "ok" and c.heir is not None:
            return s.having(c.leader, leading=None)
        if c.status == "ok":
            at = replace(at, isr=c.isr, maximal=c.isr, version=c.version + 1, waiting=False)
            return s.having(c.leader, leading=at)
        return s.having(c.leader, leading=replace(at, maximal=at.isr, waiting=False) if stay else None)

    def FenceRequest(self, s: State, l: Node) -> State:
        m, leading = s.metadata, self.leads(s, l)
        need("AllowUnknown" in self.on, "outcomes are always learned here")
        need(leading.waiting, f"{l} waits for nothing")
        need(m.leader == l and m.epoch == leading.epoch, "another leader or epoch")
        need(m.version < self.max_version, "the bound of versions is reached")
        if "MutNoFence" not in self.on:
            m = replace(m, version=m.version + 1)
        known = replace(leading, isr=m.isr, maximal=m.isr, version=m.version, waiting=False)
        return replace(s.having(l, leading=known), metadata=m)

    # Faults.

    def goes_down(self, s: State, r: Node) -> None:
        need(s.replicas[r].up, f"{r} is down")
        need(s.crashes < self.max_crash, "the bound of crashes is reached")

    def Crash(self, s: State, r: Node, k: int) -> State:
        self.goes_down(s, r)
        replica = s.replicas[r]
        need(replica.durable <= k <= len(replica.log), f"{k} is not in {replica.durable}..{len(replica.log)}")
        loses = k < len(replica.log) and not self.fsync_ack
        need(not loses or self.may_lose(s, r), "min_isr replicas would have lost something at a time")
        s = s.having(r, up=False, leading=None, log=replica.log[:k], durable=k)
        return replace(s, crashes=s.crashes + 1, lossy=s.lossy | {r} if loses else s.lossy)

    def Kill(self, s: State, r: Node) -> State:
        need("AllowKill" in self.on, "no kills here")
        self.goes_down(s, r)
        return replace(s.having(r, up=False, leading=None), crashes=s.crashes + 1)

    def Power(self, s: State, r: Node) -> State:
        need("AllowKill" in self.on, "no kills here")
        replica = s.replicas[r]
        need(not replica.up and replica.durable < len(replica.log), f"{r} is up or has nothing to lose")
        need(self.fsync_ack or self.may_lose(s, r), "min_isr replicas would have lost something at a time")
        s = s.having(r, log=replica.log[: replica.durable])
        return s if self.fsync_ack else replace(s, lossy=s.lossy | {r})

    def Wipe(self, s: State, r: Node) -> State:
        need("AllowWipe" in self.on, "no emptied disks here")
        self.goes_down(s, r)
        need(self.may_lose(s, r), "min_isr replicas would have lost something at a time")
        s = s.having(r, up=False, leading=None, log=(), durable=0, promise=0)
        return replace(s, crashes=s.crashes + 1, lossy=s.lossy | {r})

    def FailedWrite(self, s: State, l: Node) -> State:
        need({"AllowFailedWrite", "MutReuseLogId"} <= self.on, "no failed writes here")
        leading, leader = self.leads(s, l), s.replicas[l]
        end = len(leader.log)
        need(end > leading.committed and end > leading.epoch_start and leader.durable < end, "nothing that can fail")
        return s.having(l, log=leader.log[:-1])

    def Restart(self, s: State, r: Node, renew: bool) -> State:
        replica, m = s.replicas[r], s.metadata
        need(not replica.up, f"{r} is up")
        must = r in s.lossy and "MutLossyElectable" not in self.on
        need(not renew or must or "AllowRenew" in self.on, f"{r} renews its log_uid without need")
        need(renew or not must, f"{r} lost something it had acknowledged and keeps its log_uid")
        s = s.having(
            r,
            up=True,
            registration=replica.registration + 1,
            promise=max(replica.promise, m.epoch) if renew else replica.promise,
            durable=replica.durable if "MutNoRecoverySync" in self.on else len(replica.log),
            synced=len(replica.log),
        )
        return replace(s, metadata=replace(m, stale=m.stale | {r})) if renew and r in m.isr else s

    # Next, and what must hold.

    def apply(self, s: State, step: Step) -> State:
        """The state after `step`. Raises NotAStep."""
        return ACTIONS[step[0]](self, s, *step[1:])

    def steps(self, s: State) -> Iterator[tuple[Step, State]]:
        """Every step that the spec allows here, and where it leads."""
        for step in self._candidates(s):
            try:
                yield step, self.apply(s, step)
            except NotAStep:
                pass

    def _candidates(self, s: State) -> Iterator[Step]:
        """All steps there are but for those that need a leader, or a node up or down, and do not get it."""
        nodes, both = self.replicas, (False, True)
        up = [r for r in nodes if s.replicas[r].up]
        down = [r for r in nodes if not s.replicas[r].up]
        leaders = [r for r in nodes if s.replicas[r].leading is not None]
        yield from product(("Write", "Commit", "Refresh", "FenceRequest", "FailedWrite"), leaders)
        yield from product(("Push", "Shrink", "Expand"), leaders, nodes)
        yield from product(("Swap",), leaders, nodes, nodes)
        yield from product(("HandOver",), leaders, nodes, both)
        yield from product(("Sync", "Become", "Hear", "Kill", "Wipe"), up)
        yield from product(("FenceIsr", "Power"), down)
        yield from product(("Elect",), nodes, both)
        yield from product(("Restart",), down, both)
        yield from product(("EtcdApply",), s.requests)
        yield from product(("Reply",), s.requests, both)
        for r in up:
            yield from (("Crash", r, k) for k in range(s.replicas[r].durable, len(s.replicas[r].log) + 1))

    def broken(self, s: State) -> list[str]:
        """The invariants that do not hold."""
        return [name for name, holds in INVARIANTS.items() if not holds(self, s)]

    def has_all(self, s: State, node: Node) -> bool:
        # Of two contents under one log id nobody has both.
        return not s.forks and s.replicas[node].log[: len(s.acked)] == s.acked

    def NoLoss(self, s: State) -> bool:
        return all(self.has_all(s, r) for r in s.metadata.isr - s.metadata.stale if s.replicas[r].up)

    def LeaderComplete(self, s: State) -> bool:
        m, leading = s.metadata, s.replicas[s.metadata.leader].leading
        return leading is None or leading.epoch != m.epoch or self.has_all(s, m.leader)

    def NoFork(self, s: State) -> bool:
        return not s.forks

    def OnePerEpoch(self, s: State) -> bool:
        epochs = [r.leading.epoch for r in s.replicas.values() if r.leading is not None]
        return len(epochs) == len(set(epochs))

    def EnoughCopies(self, s: State) -> bool:
        complete = {r for r in self.replicas if self.has_all(s, r)} | s.lossy
        if len(complete) >= self.min_isr:
            return True
        logs = [s.replicas[r].log for r in self.replicas if r not in s.lossy]
        acked = {*enumerate(s.acked, 1), *s.forks}
        return all(len(s.lossy) + sum(log[n - 1 : n] == (entry,) for log in logs) >= self.min_isr for n, entry in acked)

    def IsrFloor(self, s: State) -> bool:
        return len(s.metadata.isr) >= self.min_isr


ACTIONS: dict[str, Callable[..., State]] = {
    name: getattr(Spec, name)
    for name in (
        *(
            "Write",
            "Push",
            "Sync",
            "Commit",
            "Elect",
            "FenceIsr",
            "Become",
            "Hear",
            "Refresh",
            "Shrink",
            "Expand",
            "Swap",
        ),
        *("HandOver", "EtcdApply", "Reply", "FenceRequest", "Crash", "Kill", "Power", "Wipe", "FailedWrite", "Restart"),
    )
}
INVARIANTS: dict[str, Callable[[Spec, State], bool]] = {
    name: getattr(Spec, name)
    for name in ("NoLoss", "LeaderComplete", "NoFork", "OnePerEpoch", "EnoughCopies", "IsrFloor")
}


@dataclass
class TraceChecker:
    """Follows a run of the real code through the spec."""

    spec: Spec = field(default_factory=Spec)
    trace: list[Step] = field(default_factory=list)  # what was followed so far

    def __post_init__(self) -> None:
        self.state = self.spec.initial()

    def step(self, action: str, *args: Any) -> None:
        """One recorded action.

        Push may carry a number of entries as third argument, and Commit the log end up to which it goes: both stand
        for that many steps of the spec, Commit for none if it is there already.

        Raises NotAStep and InvariantBroken, with the steps that led there.
        """
        self.trace.append((action, *args))
        for step in self._single(action, args):
            try:
                self.state = self.spec.apply(self.state, step)
            except NotAStep as refused:
                raise NotAStep(f"{step}: {refused}\n{self._story()}") from None
            if broken := self.spec.broken(self.state):
                raise InvariantBroken(f"{' '.join(broken)} after {step}\n{self._story()}")

    def follow(self, trace: Iterable[Step]) -> None:
        """A whole trace; raises what `step` raises."""
        for action, *args in trace:
            self.step(action, *args)

    def expect(self, node: Node, **observed: object) -> None:
        """What the real node says of itself is what the spec says of it.

        Known: `log`, `log_end`, `promise`, `up`, `registration`, `synced`; of a leader `epoch`, `isr`, `maximal`,
        `version`, `committed`, `waiting`. Of one that does not lead these are None. Raises AssertionError.
        """
        replica = self.state.replicas[node]
        for name, seen in observed.items():
            if name == "log_end":
                said: object = len(replica.log)
            elif name in Leading.__dataclass_fields__:
                said = getattr(replica.leading, name) if replica.leading else None
            else:
                said = getattr(replica, name)
            assert said == seen, f"{node}'s {name} is {seen!r}, the spec says {said!r}\n{self._story()}"

    def _single(self, action: str, args: tuple[Any, ...]) -> Iterator[Step]:
        if action == "Push" and len(args) == 3:
            yield from [(action, *args[:2])] * args[2]
        elif action == "Commit" and len(args) == 2:
            leading = self.state.replicas[args[0]].leading
            yield from [(action, args[0])] * (args[1] - leading.committed if leading else 1)
        else:
            yield (action, *args)

    def _story(self) -> str:
        last = self.trace[-40:]
        skipped = [f"  ... {len(self.trace) - len(last)} steps"] if len(last) < len(self.trace) else []
        return "\n".join(["steps:", *skipped, *(f"  {' '.join(map(str, step))}" for step in last)])
