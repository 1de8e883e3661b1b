from nsqha.commitlog.storage import MemStorage
from nsqha.server.partition.memory import EphemeralMemory
from tests.unit.server.shell_rig import PartitionRig

MIB = 1 << 20
BODY = bytes(10_000)


def ephemeral(memory: EphemeralMemory, *, channel: bool = True) -> PartitionRig:
    rig = PartitionRig(sync="none", memory=memory, limits=memory.limits, channel=channel, waiting_bytes_max=64 * MIB)
    rig.disk.jobs_held = rig.disk.rounds_held = False
    rig.pass_time(0.1)
    return rig


def bounds(topic: int = MIB, node: int = 4 * MIB) -> EphemeralMemory:
    return EphemeralMemory(topic_bytes_max=topic, node_bytes_max=node, messages_max=10_000)


def publish(rig: PartitionRig, n: int) -> int:
    """One by one, each with time for what follows; the most memory that the log had meanwhile."""
    assert isinstance(rig.storage, MemStorage)
    most = 0
    for number in range(n):
        outcome = rig.publish(b"%06d" % number + BODY)
        rig.pass_time(0.01)
        assert outcome.answers == ["OK"]
        most = max(most, rig.storage.used)
    return most


def test_a_topic_that_is_not_read_keeps_its_newest_messages_within_its_bytes():
    memory = bounds()
    rig = ephemeral(memory)
    assert publish(rig, 1_000) < MIB + 2 * len(BODY)
    bodies = rig.consume(1_000).wire.bodies
    assert [int(body[:6]) for body in bodies] == list(range(1_000 - len(bodies), 1_000))
    assert len(bodies) >= MIB // 3 // len(BODY)
    assert memory.dropped == 1_000 - len(bodies)


def test_what_is_in_flight_stays_and_new_messages_are_dropped():
    memory = bounds()
    rig = ephemeral(memory)
    consumer = rig.consume(1_000)
    assert publish(rig, 200) < MIB + 2 * len(BODY)
    kept = len(consumer.wire.bodies)
    assert [int(body[:6]) for body in consumer.wire.bodies] == list(range(kept))
    assert memory.dropped == 200 - kept > 0
    rig.fin(consumer, *[id_ for id_, *_ in consumer.wire.messages])
    for _ in range(8):
        rig.partition.keep_house(rig.partition.now())
        rig.pass_time(1.0)
    before = memory.dropped
    publish(rig, 10)
    assert len(consumer.wire.bodies) == kept + 10 and memory.dropped == before


def test_a_topic_without_channels_drops_what_has_no_room():
    memory = bounds()
    rig = ephemeral(memory, channel=False)
    assert publish(rig, 200) < MIB + 2 * len(BODY)
    assert memory.dropped > 0


def test_all_topics_of_a_node_share_its_bytes():
    memory = bounds(topic=4 * MIB, node=4 * MIB)
    rigs = [ephemeral(memory) for _ in range(4)]
    for _ in range(3):
        for rig in rigs:
            publish(rig, 150)
    for rig in rigs:
        rig.partition.keep_house(rig.partition.now())
        rig.pass_time(0.1)
    assert memory.used <= 5 * MIB
    assert all(rig.consume(1_000).wire.bodies for rig in rigs)


async def ended(rig: PartitionRig) -> None:
    await rig.partition.end("the topic was deleted")


def test_a_deleted_topic_gives_its_memory_back_at_once():
    memory = bounds()
    rig = ephemeral(memory)
    publish(rig, 50)
    assert isinstance(rig.storage, MemStorage)
    file = next(iter(rig.storage._files.values()))
    assert memory.used > 400_000
    with_end = ended(rig)
    try:
        with_end.send(None)
    except StopIteration:
        pass
    assert memory.used == rig.storage.used == len(file) == 0
