"""When a node that registered has joined: a majority in both directions, and the controller."""

from __future__ import annotations

from nsqha.replication.contacts import CONTROLLER_LOOKS, Contacts

ME, A, B, C = 1, 2, 3, 4
THREE = {ME: "me", A: "a", B: "b"}


def connected(*nodes: int, controller: bool = False) -> Contacts:
    contacts = Contacts(ME)
    for node in nodes:
        contacts.connected(node)
    if controller:
        contacts.controller_came()
    return contacts


def test_a_first_node_connects_with_itself() -> None:
    assert connected().look({ME: "me"}, "").startswith("connected with 0 of 1 brokers")
    assert connected().look({}, ""), "also before its own registration is seen"
    assert connected(ME).look({ME: "me"}, "") == ""


def test_a_majority_of_the_registered_brokers_is_needed() -> None:
    four = {**THREE, C: "c"}
    assert connected(ME, A).look(THREE, "") == ""
    assert connected(ME).look(THREE, "")
    assert connected(ME, A).look(four, "")
    assert connected(ME, A, C).look(four, "") == ""


def test_a_broker_that_is_gone_does_not_count() -> None:
    assert connected(ME, 9).look(THREE, "")


def test_a_majority_that_was_reached_is_enough_for_good() -> None:
    contacts = connected(ME)
    assert not contacts.look({ME: "me"}, "")
    assert not contacts.look({**THREE, C: "c"}, ""), "who registers later takes nothing from it"


def test_a_controller_that_is_named_has_to_come() -> None:
    contacts = connected(ME, A)
    assert contacts.look(THREE, "l1") == "controller l1 has not connected to the peer port of this node"
    contacts.controller_came()
    assert contacts.look(THREE, "l1") == "" and contacts.complete


def test_a_controller_that_is_named_later_has_some_looks_to_come() -> None:
    contacts = connected(ME, A)
    assert not contacts.look(THREE, "") and not contacts.complete
    assert not any(contacts.look(THREE, "l1") for _ in range(CONTROLLER_LOOKS))
    assert contacts.look(THREE, "l1")
    assert connected(ME, A, controller=True).look(THREE, "l2") == "", "one that came once is enough"


def test_the_text_names_the_side_that_is_not_reached() -> None:
    contacts = connected(ME)
    contacts.failed(A, "does not reach this node at 10.0.0.1:4153: no connection within 1 s")
    contacts.failed(B, "is not reached from here at b:4153: refused")
    assert contacts.look(THREE, "") == (
        "connected with 1 of 3 brokers, itself included: 2 needed; "
        "a does not reach this node at 10.0.0.1:4153: no connection within 1 s; "
        "b is not reached from here at b:4153: refused"
    )
    contacts.connected(A)
    assert contacts.look(THREE, "") == ""
