"""Frames whose words clients know."""

from __future__ import annotations

import pytest

from nsqha.cursor.live.flight import NOT_IN_FLIGHT, NOT_OWNER
from nsqha.wire import encoder, errors

ID = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (errors.BAD_PROTOCOL, b"E_BAD_PROTOCOL"),
        (errors.fin_failed(ID, NOT_IN_FLIGHT), b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"),
        (
            errors.req_failed(ID, NOT_OWNER),
            b"E_REQ_FAILED REQ 0123456789abcdef failed client does not own message",
        ),
        (
            errors.touch_failed(ID, NOT_IN_FLIGHT),
            b"E_TOUCH_FAILED TOUCH 0123456789abcdef failed ID not in flight",
        ),
        (errors.publish_failed("MPUB", "exiting"), b"E_MPUB_FAILED MPUB failed exiting"),
        (errors.sub_failed("too many"), b"E_SUB_FAILED SUB failed too many"),
        (errors.AUTH_DISABLED, b"E_AUTH_DISABLED AUTH disabled"),
        (errors.AUTH_ALREADY_SET, b"E_INVALID AUTH already set"),
        (errors.AUTH_FAILED, b"E_AUTH_FAILED AUTH failed"),
        (errors.AUTH_NOTHING_ALLOWED, b"E_UNAUTHORIZED AUTH no authorizations found"),
    ],
)
def test_texts(frame: bytes, text: bytes) -> None:
    assert frame == (4 + len(text)).to_bytes(4, "big") + b"\0\0\0\1" + text


def test_the_constant_frames() -> None:
    assert encoder.OK == b"\0\0\0\6\0\0\0\0OK"
    assert encoder.HEARTBEAT == b"\0\0\0\x0f\0\0\0\0_heartbeat_"
    assert encoder.CLOSE_WAIT == b"\0\0\0\x0e\0\0\0\0CLOSE_WAIT"
