"""JSON of others: read as Go's encoding/json reads it into a struct."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.texts import gojson


class Item(msgspec.Struct):
    name: str = ""
    size: int = 0


class Thing(msgspec.Struct):
    text: str = "kept"
    flag: bool = True
    big: int = 7
    small: gojson.Int32 = 7
    names: list[str] = []
    items: list[Item] = []
    desk: str = ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"{}", {}),
        (b"null", {}),
        (b' \n{ "text" : "a" , "unknown": [{"text": 1}] }\t', {"text": "a"}),
        (b'{"text":null,"flag":null,"big":null,"small":null}', {}),
        (b'{"names":null}', {"names": []}),
        (b'{"names":[null,"b"]}', {"names": ["", "b"]}),
        (b'{"items":[null,{"NAME":"b","size":null}]}', {"items": [Item(), Item("b")]}),
        (b'{"TEXT":"a","fLaG":false}', {"text": "a", "flag": False}),
        ('{"deſK":"s","de\u017f\u212a":"k"}'.encode(), {"desk": "k"}),
        (b'{"text":"a","TEXT":"b","Text":null}', {"text": "b"}),
        (b'{"big":-9223372036854775808,"small":2147483647}', {"big": -(1 << 63), "small": (1 << 31) - 1}),
        (b'{"big":-0}', {"big": 0}),
        (b'{"x":1e400,"y":' + b"9" * 9999 + b"}", {}),
        (b'{"text":"caf\xe9"}', {"text": "caf\ufffd"}),
        (b'{"text":"\xe2\x82x"}', {"text": "\ufffd\ufffdx"}),
        (b'{"text":"\xed\xa0\x80"}', {"text": "\ufffd\ufffd\ufffd"}),
        (b'{"text":"\\ud800a\\ud83d\\ude00"}', {"text": "\ufffda\U0001f600"}),
        (b'{"te\xffxt":"a"}', {}),
    ],
)
def test_what_go_reads(text: bytes, found: dict[str, Any]) -> None:
    assert gojson.decode(text, Thing) == Thing(**found)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{} {}",
        b"[]",
        b"7",
        b'"x"',
        b"\xef\xbb\xbf{}",
        b"\xff{}",
        b"{'text':'a'}",
        b'{"text":"a",}',
        b'{"text":"a\nb"}',
        b'{"text":7}',
        b'{"text":{}}',
        b'{"flag":0}',
        b'{"flag":"true"}',
        b'{"big":1.0}',
        b'{"big":1e3}',
        b'{"big":true}',
        b'{"big":"7"}',
        b'{"big":9223372036854775808}',
        b'{"big":-9223372036854775809}',
        b'{"big":' + b"9" * 9999 + b"}",
        b'{"small":2147483648}',
        b'{"names":{}}',
        b'{"names":"a"}',
        b'{"names":["a",7]}',
        b'{"items":[[]]}',
        b'{"items":[{"size":"7"}]}',
        b'{"text":7,"text":"a"}',
        b'{"x":NaN}',
        b'{"x":01}',
        b"[" * 100_000,
        b'{"x":' * 100_000,
    ],
)
def test_what_go_refuses(text: bytes) -> None:
    with pytest.raises(ValueError):
        gojson.decode(text, Thing)


def test_a_list_alone() -> None:
    assert gojson.decode(b'["a",null]', list[str]) == ["a", ""]
    assert gojson.decode(b"null", list[str]) == []
    assert gojson.decode(b"[1,null]", list[int]) == [1, 0]
    assert gojson.decode(b"[1,null]", list[gojson.Int32]) == [1, 0]  # type: ignore[type-var]


def test_a_field_that_is_given_whatever_it_is() -> None:
    class Asked(msgspec.Struct):
        tag: gojson.Given = False

    for value in (b"null", b"7", b"{}", b"false", b'"x"'):
        assert gojson.decode(b'{"TAG":%b}' % value, Asked).tag
    assert not gojson.decode(b'{"other":1}', Asked).tag


def test_an_error_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"^items: size: true is no integer$"):
        gojson.decode(b'{"Items":[{"SIZE":true}]}', Thing)


@given(st.binary(max_size=40) | st.dictionaries(st.sampled_from(["text", "Big", "names"]), st.text()).map(json.dumps))
def test_any_text_is_read_or_refused(text: bytes | str) -> None:
    try:
        found = gojson.decode(text if isinstance(text, bytes) else text.encode(), Thing)
    except ValueError:
        return
    found.text.encode()  # no half of a pair is left
