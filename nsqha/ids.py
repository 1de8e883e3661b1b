"""Names and numbers that the whole system shares.

A message is addressed inside by (topic uid, partition, offset). On the wire it has 16 lowercase hex digits of

    partition << 50 | (salt << 30) + offset

so conversion is one addition of a constant per partition (`id_base`), any node finds the partition of a FIN from
the id alone, and ids differ between topics and between lives of a topic. `salt` is the bit reversal of a 19-bit
counter of the cluster, XOR a constant of the cluster: consecutive topics get ids that are far apart, so a
partition runs through 2^30 messages or more before it enters another topic's block. Entering one is harmless:
nothing inside is keyed by the wire id.
"""

from __future__ import annotations

import random
import re

PARTITIONS_MAX = 1023
PARTITION_SHIFT = 50
SALT_SHIFT = 30
SALT_BITS = 19
OFFSET_MAX = 1 << 49

EPHEMERAL = "#ephemeral"

PartitionKey = tuple[int, int]
"""Topic uid and partition."""

_NAME = re.compile(r"[.a-zA-Z0-9_-]+(#ephemeral)?")
_ID = re.compile(rb"[0-9a-f]{16}")


def valid_name(name: str) -> bool:
    """Whether NSQ accepts `name` for a topic or a channel: 1 to 64 characters, the suffix included."""
    return 1 <= len(name) <= 64 and _NAME.fullmatch(name) is not None


def is_ephemeral(name: str) -> bool:
    return name.endswith(EPHEMERAL)


def topic_salt(counter: int, cluster_constant: int) -> int:
    """The salt of the `counter`-th topic (from 0) of a cluster."""
    counter &= (1 << SALT_BITS) - 1
    reverse = int(format(counter, f"0{SALT_BITS}b")[::-1], 2)
    return reverse ^ (cluster_constant & ((1 << SALT_BITS) - 1))


def id_base(partition: int, salt: int) -> int:
    """What is added to an offset of this partition to get the number behind its wire id."""
    if not 0 <= partition < PARTITIONS_MAX:
        raise ValueError(f"partition {partition} is out of range 0-{PARTITIONS_MAX - 1}")
    return (partition << PARTITION_SHIFT) | (salt << SALT_SHIFT)


def parse_message_id(raw: bytes) -> int | None:
    """The number behind a wire id; None if it is not 16 lowercase hex digits."""
    return int(raw, 16) if _ID.fullmatch(raw) else None


def partition_of(number: int) -> int:
    """Which partition the number behind a wire id belongs to."""
    return number >> PARTITION_SHIFT


def new_uid(rng: random.Random) -> int:
    """64 random bits, never 0: identifies a topic, a channel or a log for ever."""
    while True:
        uid = rng.getrandbits(64)
        if uid:
            return uid
