"""What publishers, consumers and time do to a partition in its random lives (`history`), judged by the naive model."""

from __future__ import annotations

import random
from collections.abc import Iterable

from nsqha.clock import ManualClock
from nsqha.cursor.committed.state import PartitionState
from nsqha.cursor.deferred.dead import Reason, death_of, is_dead
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.channel import Channel, Redelivery
from nsqha.cursor.partition import PartitionCursors
from tests.unit.cursor.counted import states_of
from tests.unit.cursor.judged import SMALL, Judged, Step
from tests.unit.cursor.model import PENDING, ChannelModel, Due, Model, check
from tests.unit.cursor.tiny import Record, TinyLog, fins
from tests.unit.cursor.turns import Turns

OWNERS = (1, 2, 3)
BREAKER_NS = 60 * 10**9


class Life:
    """A partition in the hands of its clients."""

    def __init__(
        self,
        seed: int,
        *,
        steps: int = 60,
        ordered: bool = False,
        limits: ChannelLimits = SMALL,
        cursors: type[PartitionCursors] = PartitionCursors,
    ) -> None:
        self.rng = random.Random(seed)
        self.steps = steps
        self.ordered = ordered
        self.limits = limits
        self.cursors_class = cursors
        self.model = Model()
        self.log = TinyLog()
        self.clock = ManualClock()
        self.record = Record()
        self.epoch = 0
        self.uids = 0
        self.encoded: dict[int, bytes] = {}
        self.published_at: dict[int, int] = {}
        self.log_unlinked = 0  # batches below this log_id are gone
        self.snapshots: list[PartitionState] = []
        self.swarm: dict[str, float] | None = None
        self.trace: list[str] = []
        self.turns: dict[Channel, Turns] = {}
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.leader = Judged(
            self.model,
            self.log,
            clock=self.clock,
            limits=self.limits,
            ordered=self.ordered,
            record=self.record,
            epoch=self.epoch,
            cursors=self.cursors_class,
        )
        self.leader.published_at = self.published_at | self.leader.published_at
        self.published_at = self.leader.published_at
        self.leader.encoded = {**self.encoded, **self.leader.encoded}
        self.encoded = self.leader.encoded

    @property
    def now_ns(self) -> int:
        return self.clock.wall_ns()

    def some_channel(self) -> tuple[Channel, ChannelModel] | None:
        """A live channel that the model knows, too (with commits lagging one may be ahead)."""
        names = sorted(self.leader.cursors.channels.keys() & self.model.channels.keys())
        if not names:
            return None
        name = self.rng.choice(names)
        return self.leader.cursors.channels[name], self.model.channels[name]

    def turns_of(self, channel: Channel) -> Turns:
        return self.turns.setdefault(channel, Turns(channel, self.limits))

    def _request(self, step: Step) -> None:
        self.leader.requested.append(step)

    # ---- publishers

    def publish(self, deliver_at: int = 0) -> None:
        count = self.rng.randint(1, 5)
        # Events come first in a batch, then its messages.
        self._request(lambda: self.model.published(count, deliver_at))
        self.leader.publish(count, deliver_at=deliver_at, force=self.rng.random() < 0.3)

    def publish_deferred(self) -> None:
        self.publish(self.now_ns + self.rng.choice([1, 20, 200]) * 1_000_000_000)

    def flush(self) -> None:
        self.leader.flush()

    # ---- consumers

    def deliver(self) -> None:
        if (found := self.some_channel()) is not None:
            self._deliver(*found, self.rng.randint(1, 6))

    def _deliver(self, channel: Channel, model: ChannelModel, count: int) -> int:
        total = 0
        owner = self.rng.choice(OWNERS)
        deadline = self.clock.monotonic() + self.rng.choice([10.0, 60.0])
        while count > 0 and (run := channel.next_run(self.leader.cursors.state.pump, count)) is not None:
            first, end = run
            check(end <= self.model.pump, f"{model.name} is to read up to {end}, the pump is at {self.model.pump}")
            stamped = [o for o in range(first, end) if o in self.model.deliver_at]
            if stamped and stamped[0] == first:
                if channel.meet(first, self.model.deliver_at[first], self.leader.now):
                    model.due.setdefault(first, Due(self.model.deliver_at[first], long=True))
                    continue
                end = first + 1
            elif stamped:
                end = stamped[0]
            if self.ordered:
                self.judge_order(model, first)
            for offset in range(first, end):
                self.judge_early(offset)
                model.delivered(offset, owner, 1, self.now_ns, self.record.policy.max_attempts)
                self.leader.log.frame_of(offset)
            channel.delivered(first, end, owner, deadline)
            self.turns_of(channel).handed_out(end - first, other=False)
            behind = channel.cursor.floor if model.ephemeral else channel.committed.floor
            check(end - behind <= self.limits.window, f"{model.name} reads {end - behind} ahead of its floor")
            total += end - first
            count -= end - first
        return total

    def redeliver(self) -> None:
        if (found := self.some_channel()) is not None:
            self._redeliver(*found, self.rng.randint(1, 6))

    def _redeliver(self, channel: Channel, model: ChannelModel, count: int) -> int:
        owner = self.rng.choice(OWNERS)
        deadline = self.clock.monotonic() + self.rng.choice([10.0, 60.0])
        for n in range(count):
            redelivery = self._redelivery(channel, model)
            if redelivery is None:
                return n
            self.judge_early(redelivery.offset)
            if self.ordered:
                check(not model.in_flight, "two messages of an ordered channel in flight")
                if not model.deliveries.get(redelivery.offset, 0):
                    self.judge_order(model, redelivery.offset)
            most = self.record.policy.max_attempts
            model.delivered(redelivery.offset, owner, redelivery.attempts, self.now_ns, most)
            self.leader.check_frame(redelivery)
            turns = self.turns_of(channel)
            turns.handed_out(1, other=not turns.is_in_order(redelivery))
            channel.redelivered(redelivery, owner, deadline)
        return count

    def _redelivery(self, channel: Channel, model: ChannelModel) -> Redelivery | None:
        """What is not new and has its turn; what is too old for that expires."""
        policy, end = self.leader.policy, channel.cursor.end
        if policy.ttl_ms is None:
            return channel.redelivery(self.leader.now)
        before = states_of(channel, end)
        redelivery = channel.redelivery(self.leader.now)
        after = states_of(channel, end)
        for offset in [offset for offset in before if after[offset] is not before[offset]]:
            ref = channel.cursor.deferred_overlay.get(offset)
            if ref is not None and ref.due_ns < self.now_ns + BREAKER_NS:
                continue  # it waited at the floor of a full window
            failed = model.deliveries.get(offset, 0) != 0
            check(failed, f"{offset} was {before[offset].name}, and is {after[offset].name}")
            old = self.published_at[offset] < self.now_ns - policy.ttl_ms * 1_000_000
            check(old, f"{offset} expires when its turn comes, and is not so old")
            self.turns_of(channel).back.pop(offset, None)
            self._expired(channel, model, offset)
        return redelivery

    def _expired(self, channel: Channel, model: ChannelModel, offset: int) -> None:
        """Dead letters are kept: it is one, unless there are too many. Else it is finished, and counted."""
        policy, tally = self.leader.policy, self.leader.tally_of(channel)
        dies = any(value is not None for value in (policy.max_attempts, policy.dead_letter, policy.dead_max))
        kept = policy.dead_letter != "drop" and not model.ephemeral
        ref = channel.cursor.deferred_overlay.get(offset)
        if dies and kept and not is_dead(ref):
            full = policy.dead_max is not None and channel.cursor.deferred_overlay.dead >= policy.dead_max
            check(full and ref is not None, f"{offset} expired, and is no dead letter")
            model.due[offset] = Due(self.now_ns + BREAKER_NS, long=True)
            return
        check(ref is None or (kept and dies), f"{offset} expired, and is {ref}")
        if dies:
            tally.died[Reason.EXPIRED] += 1
            model.died(offset, kept=kept)
        else:
            tally.expired += 1
            model.passed_over(offset)

    def hand_out(self) -> None:
        """As the broker: what is not new and has its turn, else what is new."""
        if (found := self.some_channel()) is None:
            return
        for _ in range(self.rng.randint(1, 12)):
            if not self._hand_out(*found):
                break

    def _hand_out(self, channel: Channel, model: ChannelModel) -> bool:
        """One message; whether there was one."""
        turns, now, limits = self.turns_of(channel), self.clock.monotonic(), self.limits
        redelivery = self._redelivery(channel, model)
        waiting, ready = turns.waiting(), turns.unread_ready(model, self.now_ns)
        if redelivery is not None:
            if not self.ordered and ready and not turns.is_in_order(redelivery):
                offset = redelivery.offset
                check(not turns.share_is_used(), f"{offset} goes before what is unread, and the share is used")
                back = waiting.get(offset)
                early = back is not None and not turns.has_turn(back, now, early_s=0.1)
                check(not early, f"{offset} goes before its place {back}, at {channel.cursor.next_read}")
            return self._redeliver(channel, model, 1) == 1
        free = not self.ordered and not channel.paused and len(channel.cursor.flight.singles) < limits.singles_max
        before = channel.cursor.next_read
        late = [offset for offset, back in waiting.items() if turns.has_turn(back, now)]
        used = turns.share_is_used()
        if self._deliver(channel, model, 1):
            check(not free or used or not late, f"{before} goes before {late}, whose turn it is")
            return True
        if channel.cursor.next_read != before:
            return self._hand_out(channel, model)  # it met only what is for later
        check(not free or not waiting, f"{waiting} wait, and nothing is handed out")
        return False

    def judge_early(self, offset: int) -> None:
        at = self.model.deliver_at.get(offset, 0)
        asked_for = offset in self.model.brought_forward
        check(asked_for or at <= self.now_ns, f"{offset} is delivered before its deliver-at time")

    def judge_order(self, model: ChannelModel, offset: int) -> None:
        check(not model.in_flight, "two messages of an ordered channel in flight")
        for other, status in model.status.items():
            if other < offset:
                done = status != PENDING or other in model.dead
                check(done, f"{offset} is first delivered before {other} is finished")
                check(other not in model.uncertain, f"{offset} is first delivered before FIN of {other} is committed")

    def _held(self, model: ChannelModel) -> tuple[int, list[int]] | None:
        owners = sorted(set(model.in_flight.values()))
        if not owners:
            return None
        owner = self.rng.choice(owners)
        return owner, [offset for offset, o in model.in_flight.items() if o == owner]

    def answer_fin(self) -> None:
        if (found := self.some_channel()) is None or (held := self._held(found[1])) is None:
            return
        channel, model = found
        owner, offsets = held
        count = self.rng.randint(1, len(offsets))
        self._fin(
            channel, model, owner, self.rng.sample(offsets, count) if self.rng.random() < 0.5 else offsets[:count]
        )

    def _fin(self, channel: Channel, model: ChannelModel, owner: int, offsets: list[int]) -> None:
        """As the broker: the run, and one by one where it stops."""
        data = fins(*offsets)
        pos = 0
        while pos < len(data):
            after, count = channel.fin_run(data, pos, len(data), owner)
            check(after - pos == 21 * count, "a run finished more or fewer than it went over")
            for at in range(pos, after, 21):
                self._told_fin(model, offsets[at // 21], owner, None)
            pos = after
            if pos < len(data):
                offset = offsets[pos // 21]
                self._told_fin(model, offset, owner, channel.fin(offset, owner))
                pos += 21

    def _told_fin(self, model: ChannelModel, offset: int, owner: int, why: str | None) -> None:
        wanted = model.answer(offset, owner, fin_or_req=True)
        check(why == wanted, f"FIN {offset} of {owner} got {why}, not {wanted}")
        if why is None:
            model.finished(offset)
            self.leader.tally_of(self.leader.cursors.channels[model.name]).finished += 1

    def answer_old(self) -> None:
        """A consumer answers what it does not hold, or not any more."""
        if (found := self.some_channel()) is None or not found[1].status:
            return
        channel, model = found
        old = [key for key, count in model.forgotten.items() if count]
        if old and self.rng.random() < 0.8:
            owner, offset = self.rng.choice(old)
        else:
            owner, offset = self.rng.choice(OWNERS), self.rng.choice(list(model.status))
        if self.rng.random() < 0.7:
            self._fin(channel, model, owner, [offset])
        else:
            why = channel.touch(offset, owner, self.leader.now, 10.0)
            check(why == model.answer(offset, owner, fin_or_req=False), f"TOUCH {offset} of {owner} got {why}")

    def answer_req(self) -> None:
        if (found := self.some_channel()) is None or (held := self._held(found[1])) is None:
            return
        channel, model = found
        owner, offsets = held
        offset = self.rng.choice(offsets)
        delay_s = self.rng.choice([0, 0, 2, 30, 300])
        wanted = model.answer(offset, owner, fin_or_req=True)
        why = channel.req(offset, owner, delay_s * 1000, self.leader.now)
        check(why == wanted, f"REQ {offset} of {owner} got {why}, not {wanted}")
        if why is None:
            if not self._died(channel, model, offset, Reason.REQUEUED):
                model.requeued(offset, self._due_again(channel, model, offset, delay_s))
            else:
                del model.in_flight[offset]

    def answer_touch(self) -> None:
        if (found := self.some_channel()) is None or (held := self._held(found[1])) is None:
            return
        channel, model = found
        owner, offsets = held
        offset = self.rng.choice(offsets)
        wanted = model.answer(offset, owner, fin_or_req=False)
        why = channel.touch(offset, owner, self.leader.now, 60.0)
        check(why == wanted, f"TOUCH {offset} of {owner} got {why}, not {wanted}")

    def pass_time(self) -> None:
        self.clock.advance(self.rng.choice([0.2, 2.0, 15.0, 70.0]))
        self._expire()

    def _expire(self) -> None:
        for name, channel in self.leader.cursors.channels.items():
            model = self.model.channels.get(name)
            back = channel.expire(self.leader.now)
            if model is not None:
                self._resync(channel, model, sum(count for _, count in back))
        self.leader.expire()

    def _resync(self, channel: Channel, model: ChannelModel, back: int) -> None:
        """Deadlines are the channel's business; what is in flight afterwards must be part of what was."""
        held = {o: owner for o, owner in model.in_flight.items() if channel.cursor.flight.refuse(o, owner) is None}
        check(len(held) == channel.in_flight, f"{channel.in_flight} in flight, {len(held)} by the model")
        check(len(held) + back == len(model.in_flight), "what timed out was not in flight, or was not told")
        self._failed(channel, model, model.in_flight.keys() - held.keys(), lost=False)
        model.in_flight = held

    def lose_consumer(self) -> None:
        if (found := self.some_channel()) is not None:
            channel, model = found
            owner = self.rng.choice(OWNERS)
            lost = [o for o, held in model.in_flight.items() if held == owner]
            back = channel.detach(owner, self.leader.now)
            self._failed(channel, model, lost, lost=True)
            check(back == model.detached(owner), "detach gave back another count")

    def _failed(self, channel: Channel, model: ChannelModel, offsets: Iterable[int], *, lost: bool) -> None:
        """They timed out, or their consumer is gone."""
        for offset in offsets:
            if self._died(channel, model, offset, Reason.DISCONNECTED if lost else Reason.TIMED_OUT):
                continue
            due = self._due_again(channel, model, offset, 0, lost=lost)
            if due is not None:
                model.due[offset] = due

    def _died(self, channel: Channel, model: ChannelModel, offset: int, reason: Reason) -> bool:
        """Whether the message, which just failed, is dead: it is if it may not be delivered more often, unless so many
        are dead that no more may die."""
        policy = self.record.policy
        failures = model.deliveries[offset]
        assert failures is not None, "it was in flight"
        if policy.max_attempts is None or failures < policy.max_attempts:
            return False
        overlay = channel.cursor.deferred_overlay
        self.turns_of(channel).back.pop(offset, None)
        died = self.leader.tally_of(channel).died
        if policy.dead_letter == "drop" or model.ephemeral:
            model.died(offset, kept=False)
            died[reason] += 1
            return True
        ref = overlay.get(offset)
        if ref is None or not is_dead(ref):
            check(policy.dead_max is not None and overlay.dead >= policy.dead_max, f"{offset} did not die")
            check(ref is not None and ref.due_ns >= self.now_ns + BREAKER_NS, f"{offset} may come again at once")
            return False
        model.died(offset, kept=True)
        died[reason] += 1
        check(death_of(ref.due_ns)[1] is reason, f"{offset} died of {ref}, not {reason.name}")
        return True

    def _due_again(
        self, channel: Channel, model: ChannelModel, offset: int, asked_s: float, *, lost: bool = False
    ) -> Due | None:
        """When a message that failed may come again, at the earliest; None: at once."""
        failures = model.deliveries[offset]
        assert failures is not None, "it was in flight"
        delay_s = asked_s
        policy = self.record.policy
        if policy.retry_ms is not None and not (lost and failures == 1):
            assert policy.retry_max_ms is not None and policy.retry_factor is not None
            own = min(policy.retry_ms * policy.retry_factor ** (failures - 1), policy.retry_max_ms) / 1000
            own *= 1 - (policy.retry_jitter or 0)
            delay_s = own if policy.retry_instead else max(own, asked_s)
        if not delay_s:
            self._came_back(channel, [offset])
            return None
        self.turns_of(channel).back.pop(offset, None)
        return Due(self.now_ns + round(delay_s * 1e9) - 1000, long=delay_s > self.limits.short_delay_s)

    def _came_back(self, channel: Channel, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self.turns_of(channel).came_back(offset, self.leader.cursors.state.pump, self.clock.monotonic())
