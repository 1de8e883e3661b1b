"""A cluster of a few replicas of one partition, in memory: the real decisions, and everything around them made up.

Real: `LeaderReplica`, `IsrKeeper`, `acceptance`, `divergence`, and commitlog entries with their chains. Made up, and in
the hands of whoever drives it: which message arrives when, disks, the metadata and what becomes of a compare-and-set,
elections (any member may be elected that the rules allow, alive or not is only asked of itself), crashes.

Each operation is a method; `tiny_rules` lists those that can be done now, and what must always be true. `trace` says in
one line each what happened.
"""

from __future__ import annotations

from dataclasses import replace

from nsqha.commitlog.entry import Entry, next_entry
from nsqha.election.model import PartitionMeta
from nsqha.replication import acceptance, divergence
from nsqha.replication.acceptance import Accepted, Fenced, PromiseNeeded
from nsqha.replication.isr import (
    Action,
    Applied,
    Effective,
    Fence,
    IsrLimits,
    Outcome,
    ProposalRefused,
    Propose,
    Reread,
    StepDown,
    Unknown,
)
from tests.unit.replication.tiny_parts import (
    AckMsg,
    AppendMsg,
    Leading,
    OpenedMsg,
    OpenMsg,
    RefusedMsg,
    Replica,
    Request,
    Stream,
    require,
)

TICK = 0.1


class Tiny:
    """The cluster."""

    def __init__(
        self,
        nodes: int = 3,
        *,
        min_isr: int = 2,
        sync_always: bool = True,
        members: int | None = None,
        limits: IsrLimits | None = None,
    ) -> None:
        """Of `nodes` replicas the first `members` are in the ISR; nobody has promised or leads yet."""
        self.sync_always = sync_always
        self.limits = limits or IsrLimits()
        self.now = 100.0
        self._uids = 0
        self.nodes = {uid: Replica(uid, self._new_uid()) for uid in range(1, nodes + 1)}
        inside = list(self.nodes)[: members or nodes]
        self.meta = PartitionMeta(
            leader=1,
            epoch=1,
            isr={uid: self.nodes[uid].log_uid for uid in inside},
            replicas=tuple(self.nodes),
            min_isr=min_isr,
            version=1,
        )
        self.requests: list[Request] = []
        self.streams: list[Stream] = []
        self.acked: dict[int, Entry] = {}
        self.held: dict[tuple[int, int], int] = {}  # (node, log_uid) -> the furthest end that log ever had
        self.values = 0
        self.lossy: set[int] = set()
        self.hands_over = False  # nodes say that they shut down, and the record may name a successor
        self.departing: set[int] = set()
        self.proposed: list[str] = []  # which kinds of changes leaders asked for
        self.trace: list[str] = []

    def _new_uid(self) -> int:
        self._uids += 1
        return self._uids * 100

    def say(self, line: str) -> None:
        self.trace.append(line)

    def name(self, uid: int) -> str:
        return self.nodes[uid].name

    def names(self, uids: object) -> str:
        return " ".join(self.name(uid) for uid in sorted(uids))  # type: ignore[call-overload]

    # ---- the data plane

    def write(self, uid: int) -> None:
        """Write: one batch, if the floor admits it."""
        node = self.nodes[uid]
        leading = node.leading
        assert leading is not None
        if len(leading.keeper.meta.isr) < leading.keeper.meta.min_isr:
            self.say(f"{node.name} refuses: not enough replicas")
            return
        self.values += 1
        value = b"v%d" % self.values
        entry, _ = next_entry(
            node.before(node.end),
            value,
            count=1,
            flags=0,
            timestamp_ns=self.values,
            epoch=leading.epoch,
            durable=leading.leader.durable,
        )
        node.log.append(entry)
        leading.leader.written(node.end)
        self._committed(node)
        for stream in leading.streams.values():
            self._push(node, stream)

    def sync(self, uid: int) -> None:
        """A disk round of the node ends."""
        node = self.nodes[uid]
        node.durable = node.end
        if node.leading is not None:
            node.leading.leader.acked(uid, end=node.end, durable=node.durable)
            self._committed(node)
        for stream in self.streams:
            if stream.follower == uid and stream.opened and stream.epoch == node.promise:
                stream.up.append(AckMsg(node.log_uid, node.end, node.durable))

    def connect(self, uid: int, to: int) -> None:
        """The leader opens a stream."""
        node = self.nodes[uid]
        assert node.leading is not None
        if (old := node.leading.streams.get(to)) is not None:
            self._close(old)
        stream = Stream(uid, node.leading.epoch, to, self.nodes[to].registration)
        stream.down.append(OpenMsg(node.leading.epoch))
        node.leading.streams[to] = stream
        self.streams.append(stream)

    def cut(self, stream: Stream) -> None:
        """The connection breaks; the leader notices."""
        self._close(stream)
        leading = self.nodes[stream.leader].leading
        if leading is not None and leading.streams.get(stream.follower) is stream:
            del leading.streams[stream.follower]
            leading.keeper.followers.lost(stream.follower, self.now)

    def _close(self, stream: Stream) -> None:
        stream.closed = True
        if stream in self.streams:
            self.streams.remove(stream)

    def arrives(self, stream: Stream) -> None:
        """The next message reaches the follower (Push, the first half)."""
        node = self.nodes[stream.follower]
        message = stream.down.popleft()
        if isinstance(message, OpenMsg):
            self._open(node, stream, message.epoch)
        else:
            self._append(node, stream, message)
        self._note_held(node)

    def _open(self, node: Replica, stream: Stream, epoch: int) -> None:
        for _ in range(2):
            opening = acceptance.decide_open(
                epoch=epoch,
                leader=stream.leader,
                promise=node.promise,
                meta=node.seen,
                leading=node.leading.epoch if node.leading else None,
            )
            if not isinstance(opening, acceptance.NotConfirmed):
                break
            node.seen = self.meta
        match opening:
            case Fenced(promised):
                self._refuse(stream, True, f"epoch {promised} is promised")
                return
            case acceptance.NotConfirmed(why):
                self._refuse(stream, False, why)
                return
            case PromiseNeeded(promised):
                self._stop_leading(node, f"promises epoch {promised} to {self.name(stream.leader)}")
                node.promise = promised
                self.say(f"{node.name} promises epoch {promised}")
            case Accepted():
                self._stop_leading(node, "accepts another leader")
        if not self._align(node, stream):
            self._refuse(stream, False, "the leader does not answer")
            return
        stream.opened = True
        stream.up.append(OpenedMsg(node.log_uid, node.end, node.durable, node.log[-1].chain))

    def _align(self, node: Replica, stream: Stream) -> bool:
        """The follower asks the leader where their logs part, and cuts."""
        leader = self.nodes[stream.leader]
        if not leader.up or leader.leading is None or leader.leading.epoch != stream.epoch:
            return False
        search = divergence.Divergence(
            own=node.epoch_end, chain_before=lambda log_id: node.before(log_id).chain, differs_at=node.differs_at
        )
        node.differs_at = None
        while search.outcome is None:
            search.answered(leader.epoch_end(search.asked))
        match search.outcome:
            case divergence.Truncate(to):
                acceptance.check_cut(to, committed=node.committed)
                self.say(f"{node.name} cuts at {to}")
                self._cut_log(node, to)
            case divergence.RangeGone(start):
                acceptance.check_replacement(start, committed=node.committed)
                self.say(f"{node.name} begins anew at {start}")
                self._cut_log(node, 1)
        return True

    def _cut_log(self, node: Replica, to: int) -> None:
        del node.log[to:]
        node.durable = min(node.durable, to)

    def _append(self, node: Replica, stream: Stream, message: AppendMsg) -> None:
        verdict = acceptance.decide_append(
            message.entries, epoch=message.epoch, promise=node.promise, last=node.log[-1], own=node.entry
        )
        match verdict:
            case acceptance.Append(first):
                new = message.entries[first:]
                node.log.extend(new)
                self.say(f"{node.name} appends {new[0].log_id}" + (f" to {new[-1].log_id}" if len(new) > 1 else ""))
            case acceptance.Duplicate():
                self.say(f"{node.name} has {message.entries[0].log_id} to {message.entries[-1].log_id}")
            case Fenced(promised):
                self._refuse(stream, True, f"epoch {promised} is promised")
                return
            case acceptance.Mismatch(log_id):
                node.differs_at = min(log_id, node.end - 1)
                self._refuse(stream, False, f"mismatch at {log_id}")
                return
            case acceptance.Gap(end):
                self._refuse(stream, False, f"gap at {end}")
                return
            case acceptance.NotOpened():
                self._refuse(stream, False, "not opened")
                return
        node.committed = max(node.committed, min(message.committed, node.end))
        stream.up.append(AckMsg(node.log_uid, node.end, node.durable))

    def _refuse(self, stream: Stream, fenced: bool, why: str) -> None:
        self.say(f"{self.name(stream.follower)} refuses: {why}")
        stream.opened = False
        stream.down.clear()
        stream.up.append(RefusedMsg(fenced, why))

    def returns(self, stream: Stream) -> None:
        """The next answer reaches the leader (Push, the second half)."""
        message = stream.up.popleft()
        node = self.nodes[stream.leader]
        leading = node.leading
        if leading is None or leading.streams.get(stream.follower) is not stream:
            self._close(stream)
            return
        match message:
            case OpenedMsg(log_uid, end, durable, chain):
                common = acceptance.same_past(end=end, chain=chain, own_start=1, own_end=node.end, before=node.before)
                if not common:
                    self.say(f"{self.name(stream.follower)} opened at {end} with another past")
                    if end >= node.end:
                        self.cut(stream)
                    else:
                        # It counts for nothing; the next batch does not fit there, and that tells it to look below.
                        stream.next, stream.pushing = end, True
                        self._push(node, stream)
                    return
                self.say(f"{self.name(stream.follower)} opened at {end}")
                self._heard(leading, stream, log_uid, end, durable)
                counted_end, counted_durable = leading.keeper.counted(stream.follower)
                leading.leader.opened(stream.follower, end=counted_end, durable=counted_durable)
                stream.next, stream.pushing = end, True
                self._push(node, stream)
            case AckMsg(log_uid, end, durable):
                if not stream.pushing:
                    return
                self.say(f"{self.name(stream.follower)} acks {end}" + f", {durable} on disk" * self.sync_always)
                self._heard(leading, stream, log_uid, end, durable)
                if leading.keeper.countable(stream.follower, log_uid):
                    leading.leader.acked(stream.follower, end=end, durable=durable)
            case RefusedMsg(fenced):
                self.cut(stream)
                if fenced:
                    self._stop_leading(node, "is fenced")
                    return
        self._committed(node)

    def _heard(self, leading: Leading, stream: Stream, log_uid: int, end: int, durable: int) -> None:
        leading.keeper.followers.heard(
            stream.follower,
            registration=stream.registration,
            log_uid=log_uid,
            end=end,
            durable=durable,
            now=self.now,
        )

    def _push(self, node: Replica, stream: Stream) -> None:
        if node.leading is not None and stream.pushing and stream.next < node.end:
            entries = tuple(node.log[stream.next :])
            stream.down.append(AppendMsg(stream.epoch, entries, node.leading.leader.committed))
            stream.next = node.end

    def _committed(self, node: Replica) -> None:
        """Commit: what moved is acknowledged to clients."""
        assert node.leading is not None
        committed = node.leading.leader.committed
        first = max(node.committed, 1)
        node.committed = max(node.committed, committed)
        self._note_held(node)
        for log_id in range(first, committed):
            entry = node.log[log_id]
            known = self.acked.setdefault(log_id, entry)
            require(known.chain == entry.chain, f"NoFork: {log_id} was acknowledged as {known}, and now as {entry}")
            named = self.meta.isr
            require(len(named) >= self.meta.min_isr, f"NamedCopies: {log_id} is acknowledged with ISR {dict(named)}")
            for uid, log_uid in named.items():
                held = self.held.get((uid, log_uid), 0)
                require(held > log_id, f"NamedCopies: {log_id} is acknowledged, {self.name(uid)} had {held}")
        if committed > first:
            self.say(f"{node.name} commits {committed}")

    def _note_held(self, node: Replica) -> None:
        key = (node.uid, node.log_uid)
        self.held[key] = max(self.held.get(key, 0), node.end)

    # ---- the control plane

    def tick(self, seconds: float = TICK) -> None:
        """Time passes, and every keeper looks."""
        self.now += seconds
        self.look_all()

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.tick()

    def look_all(self) -> None:
        """What a shell does after each event: ask the keepers."""
        for uid, node in self.nodes.items():
            if node.up and node.leading is not None:
                self.look(uid)

    def look(self, uid: int) -> None:
        node = self.nodes[uid]
        leading = node.leading
        if leading is not None:
            committed = leading.leader.committed
            quiet = leading.keeper.quiet and leading.keeper.followers.end == node.end
            actions = leading.keeper.step(committed=committed, end=node.end, end_durable=node.durable, now=self.now)
            require(not (quiet and actions), f"a quiet keeper wants {actions}")
            self._perform(node, actions)

    def _perform(self, node: Replica, actions: list[Action]) -> None:
        for action in actions:
            leading = node.leading
            if leading is None:
                return
            match action:
                case Effective(nodes, recorded, min_isr, acked):
                    self.say(f"{node.name} asks {self.names(nodes)}, of ISR {self.names(recorded)}")
                    leading.leader.set_isr(recorded, nodes, min_isr=min_isr, acked=acked)
                    self._committed(node)
                case Propose(meta, registered, change, why):
                    self.proposed.append(change)
                    self.say(f"{node.name} proposes {change} to {self.names(meta.isr)}: {self._named(why)}")
                    self._request(node, meta, dict(registered))
                case Fence(version):
                    self.say(f"{node.name} fences version {version}")
                    require(leading.keeper.meta.version == version, "a fence of another version than is known")
                    self._request(node, leading.keeper.meta, {})
                case Reread():
                    self.say(f"{node.name} reads again")
                    leading.reread = True
                case StepDown(why):
                    self._stop_leading(node, f"stops: {self._named(why)}")

    def _named(self, text: str) -> str:
        for node in self.nodes.values():
            text = text.replace(f"node {node.uid}", node.name)
        return text

    def _request(self, node: Replica, meta: PartitionMeta, registered: dict[int, int]) -> None:
        assert node.leading is not None
        self.requests.append(Request(node.uid, node.registration, node.leading.epoch, meta, registered))

    def settle(self, request: Request) -> None:
        """EtcdApply: compared, and applied or refused, whether or not anybody still waits."""
        fits = all(self.nodes[uid].registration == reg for uid, reg in request.registered.items())
        if request.meta.version == self.meta.version and fits:
            self._store(request.meta)
            request.outcome = Applied(self.meta)
        else:
            request.outcome = ProposalRefused(self.meta)
            self.say("the store refuses")
        if request.told:
            self.requests.remove(request)

    def answer(self, request: Request, *, bare: bool = False) -> None:
        """Reply. `bare`: a refusal that does not say what the record is."""
        assert request.outcome is not None
        self.requests.remove(request)
        outcome: Outcome = request.outcome
        self._tell(request, ProposalRefused() if bare and isinstance(outcome, ProposalRefused) else outcome)

    def give_up(self, request: Request) -> None:
        """The sender's deadline passes; the request may have been applied or may yet be."""
        request.told = True
        if request.outcome is not None:
            self.requests.remove(request)
        self._tell(request, Unknown())

    def drop(self, request: Request) -> None:
        """It never reaches the store."""
        self.requests.remove(request)

    def _tell(self, request: Request, outcome: Outcome) -> None:
        node = self.nodes[request.node]
        leading = node.leading
        if node.registration != request.registration or leading is None or leading.epoch != request.epoch:
            return
        self.say(f"{node.name} hears {type(outcome).__name__.removeprefix('Proposal').lower()}")
        self._perform(node, leading.keeper.replied(outcome, self.now))

    def refresh(self, uid: int) -> None:
        """The leader reads the record, or a watch tells it."""
        node = self.nodes[uid]
        node.seen = self.meta
        if node.leading is not None:
            node.leading.reread = False
            self._perform(node, node.leading.keeper.refreshed(self.meta, self.now))

    def _store(self, meta: PartitionMeta) -> None:
        old = self.meta.isr
        self.meta = replace(meta, version=self.meta.version + 1)
        self.say(f"ISR {self.names(self.meta.isr)} v{self.meta.version}")
        require(
            len(self.meta.isr) >= min(self.meta.min_isr, len(old)),
            f"Floor: {self.names(old)} became {self.names(self.meta.isr)}",
        )

    def electable(self, uid: int) -> bool:
        node = self.nodes[uid]
        return node.up and self.meta.isr.get(uid) == node.log_uid

    def elect(self, uid: int, *, keep: bool) -> None:
        """The controller makes a member the leader of the next epoch; it may be wrong about the old one."""
        isr = dict(self.meta.isr)
        old = self.meta.leader
        if old != uid and not keep and len(isr) - 1 >= self.meta.min_isr:
            isr.pop(old, None)
        self.say(f"{self.name(uid)} is elected, epoch {self.meta.epoch + 1}")
        self._store(replace(self.meta, leader=uid, epoch=self.meta.epoch + 1, isr=isr, successor=0))

    def expel(self, uid: int) -> None:
        """FenceIsr: the controller removes a dead member that does not lead."""
        self._store(replace(self.meta, isr={n: u for n, u in self.meta.isr.items() if n != uid}))

    def depart(self, uid: int) -> None:
        """A node says that it shuts down, or that it does not after all; every leader hears it."""
        self.departing ^= {uid}
        self.say(f"shutting down: {self.names(self.departing)}")
        for node in self.nodes.values():
            if node.leading is not None:
                node.leading.keeper.depart(frozenset(self.departing), self.now)

    def name_successor(self, uid: int) -> None:
        """The controller asks the leader to hand over to a member; 0: not any more."""
        self.say(f"{self.name(uid)} is to lead next" if uid else "nobody is to lead next")
        self._store(replace(self.meta, successor=uid))

    def may_become(self, uid: int) -> bool:
        node = self.nodes[uid]
        return self.meta.leader == uid and self.electable(uid) and node.promise < self.meta.epoch

    def become(self, uid: int) -> None:
        """Become: promise, then lead."""
        node = self.nodes[uid]
        self._stop_leading(node, "is elected anew")
        node.seen = self.meta
        node.promise = self.meta.epoch
        node.committed = 0
        node.leading = Leading(self, node)
        node.leading.keeper.depart(frozenset(self.departing), self.now)
        self.say(f"{node.name} leads epoch {self.meta.epoch} from {node.end}")

    def _stop_leading(self, node: Replica, why: str) -> None:
        if node.leading is None:
            return
        self.say(f"{node.name} {why}" if why else f"{node.name} stops")
        for stream in node.leading.streams.values():
            stream.up.clear()
        node.leading = None

    # ---- faults

    def may_lose(self, uid: int) -> bool:
        """sync=interval promises nothing when min_isr machines lose their caches (spec: Crash)."""
        return self.sync_always or len(self.lossy | {uid}) < self.meta.min_isr

    def crash(self, uid: int, keep: int) -> None:
        """Power cut: of what was not synced, the part up to `keep` survives."""
        node = self.nodes[uid]
        assert node.durable <= keep <= node.end
        if keep < node.end:
            self.lossy.add(uid)
            node.vouched = node.vouched and self.sync_always
        self.kill(uid)
        self._cut_log(node, keep)
        node.durable = keep

    def kill(self, uid: int) -> None:
        """kill -9: the page cache lives."""
        node = self.nodes[uid]
        node.up = False
        node.leading = None
        node.committed = 0
        node.seen = None
        node.differs_at = None
        for stream in list(self.streams):
            if stream.follower == uid:
                self._close(stream)
            elif stream.leader == uid:
                stream.up.clear()  # what was sent still arrives

    def wipe(self, uid: int) -> None:
        """The data directory is gone."""
        self.kill(uid)
        node = self.nodes[uid]
        self._cut_log(node, 1)
        node.durable, node.promise, node.wiped, node.vouched = 1, 0, True, False
        self.lossy.add(uid)

    def restart(self, uid: int) -> None:
        """Recovery fdatasyncs what it finds; a log that it can not vouch for gets a new uid."""
        node = self.nodes[uid]
        node.up = True
        node.registration += 1
        node.durable = node.end
        if node.wiped:
            node.promise = max(node.promise, self.meta.epoch)
        if not node.vouched:
            node.log_uid = self._new_uid()
        node.wiped, node.vouched = False, True
        self._note_held(node)
        if uid in self.departing:
            self.depart(uid)
