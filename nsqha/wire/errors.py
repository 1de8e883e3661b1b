"""Error texts of the protocol that do not come from decoding, as whole frames.

All errors close the connection except E_FIN_FAILED, E_REQ_FAILED and E_TOUCH_FAILED. What the decoder itself refuses
is worded where it is decoded (`session`, `mpub`, `identify`).
"""

from __future__ import annotations

from nsqha.wire.encoder import error

BAD_PROTOCOL = error(b"E_BAD_PROTOCOL")
AUTH_DISABLED = error(b"E_AUTH_DISABLED AUTH disabled")
AUTH_ALREADY_SET = error(b"E_INVALID AUTH already set")
AUTH_FAILED = error(b"E_AUTH_FAILED AUTH failed")
AUTH_NOTHING_ALLOWED = error(b"E_UNAUTHORIZED AUTH no authorizations found")

BAD_PARTITION = b"E_BAD_PARTITION"
NO_TOPIC = b"E_TOPIC_NOT_EXIST"
"""Clients of the Youzan fork look the topic up again on this one only."""
COMMAND_FAILED = error(b"E_INVALID internal error of the broker, see command_failed in its log")
TOO_MANY_FILES = error(b"E_INVALID too many open files at this node: try again later")


def fin_failed(message_id: bytes, why: str) -> bytes:
    return error(b"E_FIN_FAILED FIN %b failed %b" % (message_id, why.encode()))


def req_failed(message_id: bytes, why: str) -> bytes:
    return error(b"E_REQ_FAILED REQ %b failed %b" % (message_id, why.encode()))


def touch_failed(message_id: bytes, why: str) -> bytes:
    return error(b"E_TOUCH_FAILED TOUCH %b failed %b" % (message_id, why.encode()))


def publish_failed(command: str, why: str) -> bytes:
    """PUB, MPUB or DPUB was well formed but is not stored, or nobody knows whether it is."""
    return error(f"E_{command}_FAILED {command} failed {why}".encode())


def bad_partition(code: bytes, command: str, topic: str, partition: int) -> bytes:
    """The topic has fewer partitions than when the client named this one first. `code`: BAD_PARTITION, or NO_TOPIC."""
    why = f" {command} topic partition {partition} is not valid: {topic} has fewer"
    return error(code + why.encode())


def sub_failed(why: str) -> bytes:
    return error(f"E_SUB_FAILED SUB failed {why}".encode())
