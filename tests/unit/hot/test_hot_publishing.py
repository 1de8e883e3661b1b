"""From a PUB to its OK: what waits together, who waits for it, and in which order a client is answered."""

from __future__ import annotations

import random
import struct
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

OK = b"\0\0\0\6\0\0\0\0OK"
MOST = 1000


class Client:
    """Remembers what was written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.failed: list[tuple[str, str]] = []
        self.heeded = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def heed_unread(self) -> None:
        self.heeded += 1

    def publish_failed(self, command: str, why: str) -> bytes:
        self.failed.append((command, why))
        return f"<{command} {why}>".encode()

    def close(self) -> None:
        self.closed = True


class Nobody:
    def stored(self) -> None: ...

    def failed(self, why: str) -> None: ...


# ---- the queue


def filled(
    publishing: ModuleType, sizes: list[int], since: list[float] | None = None
) -> tuple[Any, list[Nobody], SimpleNamespace]:
    budget = SimpleNamespace(used=0, bytes_max=1 << 40)
    queue = publishing.PublishQueue(budget, lambda: None, MOST)
    replies = [Nobody() for _ in sizes]
    for n, (size, reply) in enumerate(zip(sizes, replies, strict=True)):
        queue.add(bytes([n % 256]) * size, reply, since[n] if since else float(n), n if n % 3 == 0 else None)
    return queue, replies, budget


@pytest.mark.parametrize("seed", range(60))
def test_every_run_is_taken_once_in_order_with_its_waiter_and_its_delay(publishing: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((1, 30, rng.randrange(1, 2 * MOST))) for _ in range(rng.randrange(9))]
    queue, replies, budget = filled(publishing, sizes)
    assert budget.used == queue.bytes_waiting == sum(sizes)
    runs: list[bytes] = []
    waiters: list[Nobody] = []
    delayed: list[tuple[int, int]] = []
    while queue.runs:
        taken = queue.take_since(float(len(waiters) + rng.randrange(3))) if rng.random() < 0.3 else queue.take()
        assert taken.size == sum(map(len, taken.runs)) and len(taken.runs) == len(taken.waiters)
        without_last = sum(map(len, taken.runs[:-1]))
        assert without_last <= MOST or taken.waiters[-1][1] < len(waiters) + 3
        delayed += [(len(runs) + index, delay) for index, delay in taken.delays]
        runs += taken.runs
        waiters += [reply for reply, _ in taken.waiters]
        assert queue.bytes_waiting == sum(map(len, queue.runs))
    assert [len(run) for run in runs] == sizes
    assert waiters == replies
    assert delayed == [(n, n) for n in range(0, len(sizes), 3)]


def test_a_batch_ends_before_the_run_that_is_too_much_and_with_a_large_run(publishing: ModuleType) -> None:
    queue, _, _ = filled(publishing, [MOST - 10, 10, 1, 3 * MOST, 5, 4 * MOST, MOST])
    assert [len(queue.take().runs) for _ in range(6)] == [2, 2, 1, 1, 1, 0]


class From(Nobody):
    """The outcome of a publish of one source."""

    def __init__(self, source: object) -> None:
        self.source = source


def crowded(publishing: ModuleType, *runs: tuple[Any, int]) -> Any:
    """A queue of runs: whose, and of what size. A source is the replies of a client, or anything else."""
    queue = publishing.PublishQueue(SimpleNamespace(used=0, bytes_max=1 << 40), lambda: None, MOST)
    for n, (source, size) in enumerate(runs):
        reply = source.publish("PUB", 1) if isinstance(source, publishing.Replies) else From(source)
        queue.add(struct.pack(">H", n) + bytes(size - 2), reply, float(n), n)
    return queue


def numbers(taken: Any) -> list[int]:
    found = [struct.unpack(">H", run[:2])[0] for run in taken.runs]
    assert taken.size == sum(map(len, taken.runs)) and len(taken.runs) == len(taken.waiters)
    assert taken.delays == list(enumerate(found)) and [since for _, since in taken.waiters] == found
    return found


def clients(publishing: ModuleType, n: int) -> list[Any]:
    return [publishing.Replies(client, client.write) for client in [Client() for _ in range(n)]]


def test_a_client_that_floods_the_queue_delays_the_others_by_one_batch(publishing: ModuleType) -> None:
    flood, one, two = clients(publishing, 3)
    queue = crowded(publishing, *[(flood, 2 * MOST)] * 3, (one, 5), (two, 5), (one, 6), ("other node", 5))
    assert [numbers(queue.take()) for _ in range(4)] == [[0], [3, 5, 4, 6, 1], [2], []]
    assert not queue.count and not queue.bytes_waiting


def test_who_comes_back_goes_before_those_that_have_more_waiting(publishing: ModuleType) -> None:
    first, second, one = clients(publishing, 3)
    queue = crowded(publishing, *[(first, 50), (second, 50)] * 100)
    queue.take()
    for n in range(5):
        queue.add(b"polite", one.publish("PUB", 1), 0.0, None)
        taken = queue.take()
        assert b"polite" in taken.runs and len(taken.runs) == MOST // 50, n


def test_sources_that_come_all_the_time_leave_half_of_a_batch_to_those_that_wait(publishing: ModuleType) -> None:
    size = MOST // 20
    queue = crowded(publishing, ("flood", MOST), *[("flood", size)] * 100)
    queue.take()
    queue.take()  # from here on it waits among those that had a turn
    for n in range(100):
        queue.add(b"n" * size, From(f"newcomer {n}"), 0.0, None)
    taken = queue.take().runs
    assert taken.count(b"n" * size) == len(taken) // 2 == 10


def test_sources_with_large_and_small_runs_have_the_same_share(publishing: ModuleType) -> None:
    queue = crowded(publishing, *[("large", MOST)] * 20, *[("small", 10)] * 2000)
    taken = [n for _ in range(20) for n in numbers(queue.take())]
    large = sum(n < 20 for n in taken) * MOST
    assert abs(large - sum(n >= 20 for n in taken) * 10) <= 2 * MOST


@pytest.mark.parametrize("seed", range(60))
def test_the_runs_of_each_source_stay_in_order_and_each_is_taken_in_time(publishing: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    sources = [*clients(publishing, rng.randrange(1, 6)), "other node", None]
    of = [rng.choice(sources) for _ in range(300)]
    sizes = [rng.choice((2, 30, rng.randrange(2, 2 * MOST))) for _ in of]
    queue = crowded(publishing, *zip(of, sizes, strict=True))
    assert queue.count == len(queue.runs) == 300 and queue.bytes_waiting == sum(sizes)
    found: list[int] = []
    for _ in range(1000):
        batch = numbers(queue.take_since(float(rng.randrange(300))) if rng.random() < 0.02 else queue.take())
        found += batch
        assert queue.bytes_waiting == sum(map(len, queue.runs)) == sum(sizes) - sum(sizes[n] for n in found)
    assert sorted(found) == list(range(300))
    for source in sources:
        mine = [n for n in found if of[n] is source]
        assert mine == sorted(mine)


def test_the_largest_run_is_taken_although_others_come_all_the_time(publishing: ModuleType) -> None:
    queue = crowded(publishing, ("front", MOST), ("large", 3 * MOST))
    for _ in range(5):
        for n in range(20):
            queue.add(bytes(50), From(n), 0.0, None)
        queue.take()
    assert 3 * MOST not in map(len, queue.runs)


def test_all_sources_are_taken_together_at_the_end(publishing: ModuleType) -> None:
    queue = crowded(publishing, *[(n % 7, 100) for n in range(70)])
    assert sorted(numbers(queue.take_all())) == list(range(70))
    assert not queue.count and numbers(queue.take()) == []


def test_of_each_source_the_first_ones_are_overdue(publishing: ModuleType) -> None:
    queue = crowded(publishing, ("a", MOST), ("a", 9), ("b", 9), ("a", 9), ("b", 9))
    assert numbers(queue.take_since(0.0)) == []
    assert numbers(queue.take_since(2.5)) == [0, 1, 2]
    queue.add(b"again", From("a"), 0.0, None)
    assert [len(run) for run in queue.take().runs] == [9, 5, 9] and not queue.count


def test_only_the_first_ones_are_overdue(publishing: ModuleType) -> None:
    queue, _, _ = filled(publishing, [1, 1, 1, 1], since=[1.0, 2.0, 9.0, 2.0])
    assert len(queue.take_since(5.0).runs) == 2
    assert len(queue.take_since(5.0).runs) == 0
    assert len(queue.runs) == 2


def test_the_flush_is_scheduled_once_until_it_begins(publishing: ModuleType) -> None:
    scheduled: list[int] = []
    queue = publishing.PublishQueue(SimpleNamespace(used=0, bytes_max=9), lambda: scheduled.append(1), MOST)
    for _ in range(3):
        queue.add(b"x", Nobody(), 0.0, None)
    assert scheduled == [1] and queue.scheduled
    queue.scheduled = False
    queue.add(b"x", Nobody(), 0.0, 7)
    assert scheduled == [1, 1] and queue.take_all().delays == [(3, 7)]


# ---- replies


class Model:
    """What a client may have read by now, by the naive rule: frames in command order, up to one that is not known."""

    def __init__(self) -> None:
        self.frames: list[list[Any]] = []  # [frame or None, whether it is the last]

    @property
    def written(self) -> bytes:
        out = b""
        for frame, last in self.frames:
            if frame is None:
                break
            out += frame
            if last:
                break
        return out

    @property
    def closed(self) -> bool:
        known = [frame is not None for frame, _ in self.frames]
        return any(last and all(known[: n + 1]) for n, (_, last) in enumerate(self.frames))


@pytest.mark.parametrize("seed", range(300))
def test_a_client_is_answered_in_the_order_of_its_commands(publishing: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    client, model = Client(), Model()
    replies = publishing.Replies(client, client.write)
    emptied: list[int] = []
    replies.on_empty = lambda: emptied.append(len(model.frames))
    open_: list[tuple[Any, int, str, int]] = []
    for n in range(60):
        if client.closed:
            break
        match rng.randrange(8):
            case 0 | 1 | 2:
                command, count = rng.choice((("PUB", 1), ("PUB", 3), ("PUB", 300), ("MPUB", 5), ("DPUB", 1)))
                open_.append((replies.publish(command, count), n, command, count))
                model.frames.append([None, False])
                open_[-1] = (open_[-1][0], len(model.frames) - 1, command, count)
            case 3:
                model.frames.append([b"<%d>" % n, False])
                replies.reply(b"<%d>" % n)
            case 4 if rng.random() < 0.1:
                model.frames.append([b"<fatal>", True])
                replies.fatal(b"<fatal>")
            case 5 if open_ and rng.random() < 0.2:
                slot, at, command, _ = open_.pop(rng.randrange(len(open_)))
                model.frames[at] = [f"<{command} why>".encode(), True]
                slot.failed("why")
            case _ if open_:
                slot, at, command, count = open_.pop(rng.randrange(len(open_)))
                model.frames[at] = [OK * (count if command == "PUB" else 1), False]
                slot.stored()
        assert (b"".join(client.written), client.closed) == (model.written, model.closed)
        assert client.closed or bool(replies) == any(frame is None for frame, _ in model.frames)
        replies.behind = rng.random() < 0.2
    if client.closed:
        for slot, _, _, _ in open_:  # nobody is there any more
            slot.stored()
        assert b"".join(client.written) == model.written
    assert not client.closed or not replies


def test_who_waits_for_the_last_answer_is_told_when_it_left(publishing: ModuleType) -> None:
    client = Client()
    replies = publishing.Replies(client, client.write)
    left: list[int] = []
    replies.on_empty = lambda: left.append(len(client.written))
    first, second, third = replies.publish("PUB", 1), replies.publish("PUB", 2), replies.publish("PUB", 1)
    second.stored()
    assert not left and not client.written
    first.stored()
    assert not left and client.written == [OK * 3], "in one write"
    third.stored()
    assert left == [2]


def test_a_client_that_is_behind_is_heeded_at_each_write(publishing: ModuleType) -> None:
    client = Client()
    replies = publishing.Replies(client, client.write)
    replies.behind = True
    slot = replies.publish("PUB", 1)
    replies.reply(b"later")
    assert not client.heeded
    slot.stored()
    replies.reply(b"more")
    assert client.heeded == 2 and client.written == [OK + b"later", b"more"]


def test_many_that_were_never_answered_go_with_their_client(publishing: ModuleType) -> None:
    for clear in (True, False):
        replies = publishing.Replies(Client(), lambda data: None)
        last = [replies.publish("PUB", 1) for _ in range(200_000)][-1]
        if clear:
            replies.clear()
            assert not replies
            last.stored()
        del replies, last


def test_everybody_is_told_although_one_can_not_be(publishing: ModuleType) -> None:
    class Broken(Nobody):
        def stored(self) -> None:
            raise RuntimeError("gone")

    clients = [Client() for _ in range(3)]
    clients[1].write = Broken().stored  # type: ignore[method-assign, assignment]
    waiters: list[tuple[Any, float]] = [
        (publishing.Replies(client, client.write).publish("PUB", n + 1), 0.0) for n, client in enumerate(clients)
    ]
    errors: list[Exception] = []
    publishing.tell_stored([*waiters, (Broken(), 1.0), (Nobody(), 2.0)], errors.append)
    assert [type(error) for error in errors] == [RuntimeError, TypeError]
    assert [client.written for client in clients] == [[OK], [], [OK * 3]]


def test_what_was_stored_for_one_client_is_told_in_one_write(publishing: ModuleType) -> None:
    client = Client()
    replies = publishing.Replies(client, client.write)
    publishing.tell_stored([(replies.publish("PUB", n), 0.0) for n in (1, 2, 3)], lambda error: None)
    assert client.written == [OK * 6]


# ---- a publisher


class Desk:
    """A publisher to topic `t`, bodies of up to nine bytes."""

    def __init__(self, publishing: ModuleType, most: int = MOST) -> None:
        self.client = Client()
        self.budget = SimpleNamespace(used=0, bytes_max=100)
        self.most = most
        self.full = 0
        self.counts = {"t": 0}
        self.now = 12.5
        self.replies = publishing.Replies(self.client, self.client.write)
        self.queue = publishing.PublishQueue(self.budget, lambda: None, self.most)
        self.publisher = publishing.Publisher(
            b"PUB t\n", "t", 9, self.queue, self.replies, self.counts, lambda: self.now, self._spent
        )

    def _spent(self) -> None:
        assert self.queue.full
        self.full += 1

    def state(self) -> tuple[object, ...]:
        queue = self.queue
        return list(queue.runs), queue.bytes_waiting, self.budget.used, self.counts["t"], bool(self.replies)


def pubs(*bodies: bytes, line: bytes = b"PUB t\n") -> bytes:
    return b"".join(line + struct.pack(">I", len(body)) + body for body in bodies)


def frames(*bodies: bytes) -> bytes:
    return b"".join(struct.pack(">IIqH16s", 30 + len(body), 2, 0, 1, b"") + body for body in bodies)


def test_whole_pubs_are_taken_and_answered(publishing: ModuleType) -> None:
    desk = Desk(publishing)
    assert desk.publisher.take(pubs(b"one")) and desk.publisher.taken_at == 12.5
    assert desk.publisher.take(pubs(b"two", b"three"))
    taken = desk.queue.take_all()
    assert taken.runs == [frames(b"one"), frames(b"two", b"three")] and taken.size == desk.budget.used
    assert desk.counts == {"t": 3} and [since for _, since in taken.waiters] == [12.5, 12.5]
    publishing.tell_stored(taken.waiters, lambda error: None)
    assert desk.client.written == [OK * 3]


def test_who_waits_does_so_since_the_tick_in_which_it_was_read(publishing: ModuleType) -> None:
    desk = Desk(publishing)
    desk.queue.scheduled = True  # by somebody else
    for now in (20.0, 30.0, 40.0):
        desk.now = now
        assert desk.publisher.take(pubs(b"one")) and desk.publisher.take(pubs(b"two"))
        desk.queue.scheduled = False
    assert [since for _, since in desk.queue.take_all().waiters] == [20.0, 20.0, 30.0, 30.0, 40.0, 40.0]
    desk.now = 50.0
    assert desk.publisher.take(pubs(b"one")) and desk.publisher.taken_at == 50.0


WHOLE = pubs(b"one", b"two")


@pytest.mark.parametrize(
    "data",
    [
        *(WHOLE[:n] for n in range(len(WHOLE)) if n != len(WHOLE) // 2),
        WHOLE + b"P",
        WHOLE + b"FIN 0123456789abcdef\n",
        pubs(b"one", line=b"PUB u\n"),
        pubs(b"one", line=b"PUB t \n"),
        pubs(b"one", b""),
        pubs(b"ten bytes!"),
        b"PUB t\n\xff\xff\xff\xffone",
        b"NOP\n" + WHOLE,
    ],
)
def test_of_anything_else_nothing_is_done(publishing: ModuleType, data: bytes) -> None:
    desk = Desk(publishing)
    before = desk.state()
    assert not desk.publisher.take(data) and desk.state() == before


def test_who_spends_the_budget_is_told_each_time(publishing: ModuleType) -> None:
    desk = Desk(publishing)
    for n in (0, 0, 1, 2):  # 37 bytes each
        assert desk.publisher.take(pubs(b"one")) and desk.full == n
    desk.budget.used = 0
    assert desk.publisher.take(pubs(b"one")) and desk.full == 2 and not desk.queue.full


def test_a_closed_queue_is_given_nothing(publishing: ModuleType) -> None:
    desk = Desk(publishing)
    desk.queue.closed = True
    before = desk.state()
    assert not desk.publisher.take(WHOLE) and desk.state() == before


# ---- a publisher that was alone in the last batch


class LoneDesk(Desk):
    """A desk whose queue writes lone publishes, as long as `writes` says so."""

    def __init__(self, publishing: ModuleType, most: int = MOST) -> None:
        super().__init__(publishing, most)
        self.publishing = publishing
        self.writes = True
        self.lone: list[bytes] = []
        self.queue.write_lone = self._write_lone

    def _write_lone(self, run: bytes, slot: Any) -> bool:
        if self.writes:
            self.lone.append(run)
            slot.stored()
        return self.writes

    def batch(self) -> None:
        """What waits is written and answered."""
        self.queue.scheduled = False
        taken = self.queue.take()
        self.budget.used -= taken.size
        self.publishing.tell_stored(taken.waiters, lambda error: None)


def alone(publishing: ModuleType, most: int = MOST) -> LoneDesk:
    desk = LoneDesk(publishing, most)
    assert desk.publisher.take(pubs(b"one")) and not desk.lone, "nothing is known of it yet"
    desk.batch()
    return desk


def test_who_was_alone_in_the_last_batch_is_written_at_once(publishing: ModuleType) -> None:
    desk = alone(publishing)
    desk.now = 13.5
    assert desk.publisher.take(pubs(b"two")) and desk.publisher.taken_at == 13.5
    assert desk.publisher.take(pubs(b"three", b"four"))
    assert desk.lone == [frames(b"two"), frames(b"three", b"four")]
    assert desk.client.written == [OK, OK, OK * 2] and desk.counts == {"t": 4}
    assert not desk.queue.runs and not desk.budget.used and not desk.replies


def test_what_is_not_written_at_once_waits_as_any_other(publishing: ModuleType) -> None:
    desk = alone(publishing)
    desk.writes = False
    assert desk.publisher.take(pubs(b"two"))
    assert desk.queue.runs == [frames(b"two")] and desk.budget.used == len(frames(b"two"))
    desk.writes = True
    assert desk.publisher.take(pubs(b"three")) and not desk.lone, "not before the one that waits"
    desk.batch()
    assert desk.client.written == [OK, OK * 2] and not desk.replies


def test_nobody_is_alone_while_others_publish(publishing: ModuleType) -> None:
    desk = alone(publishing)
    others = publishing.Replies(desk.client, desk.client.write)
    desk.queue.add(frames(b"other"), others.publish("PUB", 1), 1.0, None)
    assert desk.publisher.take(pubs(b"two")) and not desk.lone, "another one waits"
    desk.batch()
    assert desk.publisher.take(pubs(b"three")) and not desk.lone, "the last batch was of two"
    desk.batch()
    desk.queue.add(frames(b"other"), others.publish("PUB", 1), 1.0, None)
    desk.batch()
    assert desk.publisher.take(pubs(b"four")) and not desk.lone, "the last batch was of another one"
    desk.batch()
    desk.queue.add(frames(b"other"), Nobody(), 1.0, None)
    desk.batch()
    assert desk.publisher.take(pubs(b"five")) and not desk.lone, "the last batch was not of a client"
    desk.batch()
    desk.queue.scheduled = True
    assert desk.publisher.take(pubs(b"six")) and not desk.lone, "a batch is about to be written"


def test_a_batch_of_events_changes_nothing_for_who_is_alone(publishing: ModuleType) -> None:
    desk = alone(publishing)
    desk.queue.take_all()
    assert desk.publisher.take(pubs(b"two")) and desk.lone


def test_part_of_what_waits_makes_nobody_alone(publishing: ModuleType) -> None:
    desk = alone(publishing, len(frames(b"two")))
    desk.queue.scheduled = True
    assert desk.publisher.take(pubs(b"two")) and desk.publisher.take(pubs(b"three"))
    publishing.tell_stored(desk.queue.take().waiters, lambda error: None)
    publishing.tell_stored(desk.queue.take_since(99.0).waiters, lambda error: None)
    desk.queue.scheduled = False
    assert desk.publisher.take(pubs(b"four")) and not desk.lone


def test_a_queue_that_writes_nothing_at_once_takes_what_comes(publishing: ModuleType) -> None:
    desk = alone(publishing)
    desk.queue.write_lone = None
    assert desk.publisher.take(pubs(b"two")) and desk.queue.runs
