"""The command line against a real node: every example of every help text, exit statuses, both streams."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.cli import build_parser
from nsqha.cli.brokers.admin import Admin
from nsqha.cli.terminal.parser import Parser
from tests.integration.devnode import BIN, DevNode
from tests.integration.servers import wait_until
from tests.unit.cli.test_import_nsqd import nsqd_data


def verbs(parser: Parser) -> Iterator[Parser]:
    """Every verb that does something."""
    below = parser.verbs()
    if not below:
        yield parser
    for child in below.values():
        yield from verbs(child)


VERBS = {verb.prog: verb for verb in verbs(build_parser())}
ELSEWHERE = ("nsqha dev", "nsqha broker", "nsqha lookupd", "nsqha cluster", "nsqha check cluster")
"""Of test_dev.py, test_dev_cluster.py and test_check.py."""
EXAMPLES = [
    (verb, example) for verb in VERBS.values() for example in verb.examples if not example.startswith(ELSEWHERE)
]


def ends_by_itself(example: str) -> bool:
    words = shlex.split(example)
    consumes = words[1] in ("sub", "tail") and not {"-n", "--idle"} & set(words)
    return not consumes and "--watch" not in words


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "orders.jsonl").write_text('{"order": 1}\n\n{"order": 2}\n')
    (folder / "access.toml").write_text('anonymous = ["viewer"]\n')
    (folder / ".config/fish/completions").mkdir(parents=True)
    (folder / "nsqd").mkdir()
    nsqd_data(folder / "nsqd", channels={"c": False})
    node = DevNode(folder, "--sync=interval")
    node.create("orders", "billing")
    yield node
    assert node.stop() == 0


def held_message(node: DevNode, *, dead: bool) -> str:
    """The id of a deferred message, or of a dead letter."""
    node.ok("pub", "orders", "later", "--delay", "1h")
    listed = node.ok("message", "list", "orders", "billing", "--state", "deferred", "--json").splitlines()
    found = str(json.loads(listed[-1])["id"])
    if dead:
        node.ok("message", "kill", "orders", "billing", found)
    return found


def keys_of(shape: str) -> set[str]:
    """The top-level keys of a help text's shape."""
    found: set[str] = set()
    depth = at = 0
    while at < len(shape):
        if shape[at] in "{[":
            depth += 1
        elif shape[at] in "}]":
            depth -= 1
            if depth == 0:
                return found
        elif shape[at] == '"' and depth == 1:
            end = shape.index('"', at + 1)
            found.add(shape[at + 1 : end])
            at = end
        at += 1
    raise AssertionError(shape)


def check_shape(verb: Parser, stdout: str) -> None:
    for line in stdout.splitlines():
        shown = set(json.loads(line))
        if "body_base64" in shown:
            shown = shown - {"body_base64"} | {"body"}
        assert shown == keys_of(verb.shape), verb.prog


# ---- the help


def test_every_verb_has_examples_and_statuses() -> None:
    for verb in VERBS.values():
        assert verb.examples, verb.prog
        assert "exit status: 0 ok" in (verb.epilog or ""), verb.prog
        for example in verb.examples:
            assert f"{verb.prog} " in f"{example} ", example
        if any(action.dest == "json" for action in verb._actions):
            assert keys_of(verb.shape), verb.prog


@pytest.mark.parametrize(("verb", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_every_example_runs(node: DevNode, verb: Parser, example: str) -> None:
    node.publish("orders", *[f"order {n}" for n in range(10)])
    if verb.prog == "nsqha topic release":
        with Admin(node.grpc, 10) as admin:
            admin.call_segments("Snapshot", topics=["orders"], hold_ms=60_000, hold_id="00c0ffee00c0ffee")
    if verb.prog.startswith(("nsqha message", "nsqha dead")):
        example = example.replace("0000000000000002", held_message(node, dead=verb.prog.startswith("nsqha dead")))
    environment = node.environment | {"HOME": str(node.folder), "NSQHA_ADDRESS": node.http}
    example = example.replace("/var/lib/nsqd", str(node.folder / "nsqd")).replace("127.0.0.1:4151", node.http)
    if ends_by_itself(example):
        done = subprocess.run(
            ["sh", "-c", example], cwd=node.folder, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        if "--json" in example:
            check_shape(verb, done.stdout)
            # A tail shows only what comes meanwhile, and no message waits for its next delivery.
            assert done.stdout or verb.prog == "nsqha tail" or "--state waiting" in example
        return
    process = subprocess.Popen(
        [str(BIN / "nsqha"), *shlex.split(example)[1:]],
        cwd=node.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    # A tail shows only what comes later, so something has to; publish until it has seen one.
    output = process.stdout.fileno()

    def shown() -> bool:
        node.publish("orders", "later")
        return process.poll() is not None or select_readable(output)

    wait_until(shown, f"`{example}` shows something", 60)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr
    assert stdout
    assert stderr == ""


def test_an_interrupt_is_noticed_also_if_no_wait_is_interrupted(node: DevNode) -> None:
    """It may come in the moment before the wait begins; here another thread gets it."""
    code = (
        "import signal, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "from nsqha.cli import main\n"
        "main()\n"
    )
    node.publish("interrupted", "first")
    process = subprocess.Popen(
        [sys.executable, "-c", code, "sub", "interrupted", "c"],
        env=node.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "first\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)  # before the next heartbeat ends the wait
    assert (process.returncode, stderr) == (130, "")


def test_an_interrupt_is_noticed_also_if_it_comes_in_a_finalizer() -> None:
    """The interpreter drops what is raised there."""
    code = (
        "import signal, time\n"
        "from nsqha.cli.terminal import exits\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finalized:\n"
        "    def __del__(self):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "def command():\n"
        "    try:\n"
        "        Finalized()\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        return exits.INTERRUPTED\n"
        "exits.run(command)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "")


def select_readable(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0.1)[0])


def test_help_and_data_verbs_never_import_what_is_slow() -> None:
    for words in (
        ["--help"],
        ["seek", "--help"],
        ["pub", "--help"],
        ["dev", "--help"],
        ["cluster", "--help"],
        ["log", "verify", "nowhere"],
    ):
        code = (
            f"import sys; sys.argv = ['nsqha', *{words!r}]\n"
            "from nsqha.cli import main\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            "slow = {'grpc', 'google', 'aiohttp', 'uvloop', 'asyncio', 'msgspec', 'lmdb'} & set(sys.modules)\n"
            "assert not slow, slow"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)


# ---- exit statuses and streams


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["topik"], 2, "did you mean topic?"),
        (["topic", "lst"], 2, "did you mean list?"),
        (["seek", "orders", "billing", "start", "--plann"], 2, "did you mean --plan?"),
        (["seek", "orders", "billing", "yesterday"], 2, "is not a place"),
        (["seek", "orders", "billing"], 2, "TO or --undo"),
        (["seek", "orders", "billing", "undo"], 2, "--undo"),
        (["seek", "orders/x", "billing", "start"], 2, "TOPIC/PARTITION"),
        (["seek", "orders", "billing", "-2y"], 2, "not a duration"),
        (["pub", "no/good", "x"], 2, "is not a name"),
        (["pub", "orders", "x", "--delay", "soon"], 2, "not a duration"),
        (["pub", "orders", "--file", "missing.txt"], 2, "missing.txt"),
        (["sub", "orders", "billing", "--requeue", "1s"], 2, "needs -n"),
        (["topic", "set", "orders"], 2, "nothing to change"),
        (["topic", "set", "orders", "--retention-bytes", "lots"], 2, "is not a size"),
        (["topic", "show", "ordesr"], 3, "did you mean orders?"),
        (["channel", "show", "orders", "biling"], 3, "did you mean billing?"),
        (["seek", "orders", "biling", "start", "--plan"], 3, "did you mean billing?"),
        (["seek", "orders", "billing", "ffffffffffffffff", "--yes"], 3, "ffffffffffffffff"),
        (["seek", "orders/9", "billing", "start", "--yes"], 3, "no partition 9"),
        (["log", "skip", "ordesr"], 3, "did you mean orders?"),
        (["log", "skip", "orders", "biling"], 3, "did you mean billing?"),
        (["topic", "create", "orders"], 4, "exists already"),
        (["log", "verify", "nowhere"], 3, "no folder nowhere"),
        (["log", "dump", "data", "ordesr"], 3, "did you mean orders?"),
        (["topic", "list", "--grpc-address", "127.0.0.1:1"], 6, "nsqha dev"),
        (["pub", "orders", "x", "--nsqd-tcp-address", "127.0.0.1:1"], 6, "nsqha dev"),
        (["topic", "list", "--grpc-address", "nonsense"], 2, "is not HOST:PORT"),
        (["pub", "orders", "x", "--timeout", "0s"], 2, "not above zero"),
        (["topic", "delete", "orders"], 8, "--yes"),
        (["channel", "empty", "orders", "billing"], 8, "--yes"),
        (["topic", "set", "orders", "--retention", "1s"], 8, "--yes"),
        (["seek", "orders", "billing", "start"], 8, "--yes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_goes_wrong_is_one_line_on_stderr(node: DevNode, words: list[str], status: int, said: str) -> None:
    done = node.run(*words)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert done.stdout == ""
    if status != 8:  # the plan comes before the question
        assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_json_is_all_there_is_on_stdout(node: DevNode) -> None:
    for verb, words in (
        ("nsqha topic pause", ["orders"]),
        ("nsqha topic unpause", ["orders"]),
        ("nsqha channel pause", ["orders", "billing"]),
        ("nsqha channel unpause", ["orders", "billing"]),
        ("nsqha channel empty", ["orders", "billing", "--yes"]),
        ("nsqha topic empty", ["orders", "--yes"]),
        ("nsqha seek", ["orders", "billing", "end", "--yes"]),
        ("nsqha topic set", ["orders", "--retention", "7d", "--yes"]),
    ):
        done = node.run(*verb.split()[1:], *words, "--json")
        assert done.stderr == ""
        check_shape(VERBS[verb], done.stdout)


def test_an_unconfirmed_seek_changes_nothing(node: DevNode) -> None:
    node.create("quiet", "c")
    node.publish("quiet", "a", "b")
    node.ok("seek", "quiet", "c", "end", "--yes")
    before = node.json("channel", "show", "quiet", "c")["partitions"]
    assert node.run("seek", "quiet", "c", "start").returncode == 8
    assert node.json("seek", "quiet", "c", "start", "--plan")["done"] is False
    assert node.json("channel", "show", "quiet", "c")["partitions"] == before


def asked(node: DevNode, answer: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What a verb does for somebody who answers this."""
    mine, theirs = pty.openpty()
    os.write(mine, answer.encode())
    command = [str(BIN / "nsqha"), *words]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, env=node.environment, timeout=60)
    os.close(mine)
    os.close(theirs)
    return done


@pytest.mark.parametrize(("answer", "status", "floor"), [("y\n", 0, 0), ("n\n", 8, 2), ("\n", 8, 2)])
def test_on_a_terminal_it_asks(node: DevNode, answer: str, status: int, floor: int) -> None:
    topic = f"asked-{ord(answer[0])}"
    node.create(topic, "c")
    node.publish(topic, "a", "b")
    node.ok("seek", topic, "c", "end", "--yes")
    done = asked(node, answer, "seek", topic, "c", "start")
    assert done.returncode == status
    assert "2 again" in done.stderr
    assert "[y/N]" in done.stderr
    assert node.json("channel", "show", topic, "c")["partitions"][0]["floor"] == floor


@pytest.mark.parametrize(
    ("answer", "status", "depth"), [("skip\n", 0, 0), ("y\n", 8, 2), ("yes\n", 8, 2), ("\n", 8, 2)]
)
@pytest.mark.parametrize("words", [("seek", "end"), ("channel empty",), ("channel delete",)])
def test_skipping_what_was_never_finished_takes_the_word(
    node: DevNode, words: tuple[str, ...], answer: str, status: int, depth: int
) -> None:
    topic = f"skips-{words[0].replace(' ', '-')}-{len(answer)}"
    node.create(topic, "c")
    node.publish(topic, "a", "b")
    done = asked(node, answer, *words[0].split(), topic, "c", *words[1:])
    assert done.returncode == status, done
    assert "It skips 2 messages that were never finished: type skip to do it: " in done.stderr
    assert ("skipped 2 messages that were never finished" in done.stderr) == (status == 0)
    if words[0] != "channel delete":
        assert node.json("channel", "show", topic, "c")["depth"] == depth


def test_with_yes_the_line_says_what_is_skipped(node: DevNode) -> None:
    node.create("says", "c")
    node.publish("says", "a", "b", "c")
    said = node.run("seek", "says", "c", "1", "--plan")
    assert "1 skipped" in said.stdout and "it would skip 1 message that was never finished" in said.stderr
    assert "skipped 1 message that was never finished" in node.run("seek", "says", "c", "1", "--yes").stderr
    (partition,) = node.json("seek", "says", "c", "--undo", "--plan")["partitions"]
    assert (partition["again"], partition["skipped"]) == (1, 0)
    assert node.json("channel", "empty", "says", "c", "--yes")["skipped"] == 2
    (partition,) = node.json("seek", "says", "c", "--undo", "--yes")["partitions"]
    assert (partition["again"], partition["skipped"], partition["messages"]) == (2, 0, 2)
    node.ok("topic", "pause", "says")
    node.publish("says", "d")
    assert "skipped 1 message that was never finished" in node.run("topic", "empty", "says", "--yes").stderr


# ---- pub, sub, tail


def test_published_lines_arrive_in_order(node: DevNode) -> None:
    lines = [f"line {n}" for n in range(1000)]
    node.create("lines", "c")
    done = node.run("pub", "lines", "--json", stdin="\n".join(lines))
    told = json.loads(done.stdout)
    assert (told["published"], told["bytes"], told["skipped_empty"]) == (1000, sum(map(len, lines)), 0)
    assert node.ok("sub", "lines", "c", "-n", "1000").splitlines() == lines
    channel = node.json("channel", "show", "lines", "c")
    assert (channel["depth"], channel["in_flight"], channel["finished"]) == (0, 0, 1000)


@pytest.mark.parametrize("port", ["tcp", "http", "grpc", "lookupd"])
def test_any_address_leads_to_the_rest(node: DevNode, port: str) -> None:
    at = f"--address={node.description['lookupd'][0]['http'] if port == 'lookupd' else getattr(node, port)}"
    topic = f"from-{port}"
    node.ok("pub", topic, "hello", at)
    assert topic in node.ok("topic", "list", at)
    assert node.ok("sub", topic, "c", "-n", "1", at) == "hello\n"
    node.ok("topic", "delete", topic, "--yes", at)


def test_the_register_port_of_a_lookup_daemon_is_named_as_that(node: DevNode) -> None:
    done = node.run("topic", "list", f"--address={node.description['lookupd'][0]['tcp']}")
    assert done.returncode == 2 and "give its HTTP port" in done.stderr


def test_n_takes_exactly_n(node: DevNode) -> None:
    node.create("exact", "c")
    node.publish("exact", *[str(n) for n in range(10)])
    for first in (0, 3, 6):
        assert node.ok("sub", "exact", "c", "-n", "3").split() == [str(n) for n in range(first, first + 3)]
    told = [json.loads(line) for line in node.ok("sub", "exact", "c", "-n", "1", "--json").splitlines()]
    assert [(m["body"], m["attempts"]) for m in told] == [("9", 1)]


def test_too_few_messages_end_with_unreachable_or_timed_out(node: DevNode) -> None:
    node.publish("few", "only")
    done = node.run("sub", "few", "c", "-n", "2", "--idle", "300ms")
    assert (done.returncode, done.stdout) == (6, "only\n")
    assert "1 of 2" in done.stderr


def test_requeue_gives_messages_back(node: DevNode) -> None:
    node.publish("back", "again")
    assert node.ok("sub", "back", "c", "-n", "1", "--requeue", "0s") == "again\n"
    told = json.loads(node.ok("sub", "back", "c", "-n", "1", "--json"))
    assert (told["body"], told["attempts"]) == ("again", 2)


def test_whole_files_and_odd_bytes(node: DevNode) -> None:
    body = bytes(range(256))
    (node.folder / "odd.bin").write_bytes(body)
    node.ok("pub", "whole", "--whole", "--file", "odd.bin")
    assert "body_base64" in node.ok("peek", "whole", "--json")
    done = subprocess.run(
        [str(BIN / "nsqha"), "peek", "whole", "--raw"], env=node.environment, capture_output=True, timeout=60
    )
    assert done.stdout == body + b"\n"


def test_a_rate_is_kept(node: DevNode) -> None:
    started = time.monotonic()
    node.ok("pub", "paced", *["x"] * 30, "--rate", "60")
    assert time.monotonic() - started >= 29 / 60


def test_lines_are_published_as_they_come(node: DevNode) -> None:
    command = [str(BIN / "nsqha"), "pub", "slowly"]
    process = subprocess.Popen(command, env=node.environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write("first\n")
    process.stdin.flush()
    assert node.ok("sub", "slowly", "c", "-n", "1") == "first\n"
    _, stderr = process.communicate("second\n", timeout=20)
    assert process.returncode == 0
    assert "published 2 messages" in stderr


def test_a_refused_message_says_what_was_published(node: DevNode) -> None:
    (node.folder / "big.txt").write_text("fine\n" + "x" * (2 << 20) + "\n")
    done = node.run("pub", "refused", "--file", "big.txt")
    assert done.returncode == 7
    assert "E_BAD_MESSAGE" in done.stderr
    assert "after 1 message:" in done.stderr
    assert node.ok("peek", "refused", "--raw") == "fine\n"


def test_tail_leaves_no_channel_behind(node: DevNode) -> None:
    node.create("watched", "c")
    assert node.ok("tail", "watched", "--idle", "200ms") == ""
    for _ in range(50):
        if node.ok("channel", "list", "watched", "--names") == "c\n":
            return
        time.sleep(0.05)
    raise AssertionError("the ephemeral channel is still there")


def test_a_reader_that_goes_away_is_no_error_message(node: DevNode) -> None:
    node.publish("piped", *["x" * 1000] * 500)
    script = "set -o pipefail; nsqha peek piped start -n 500 --json | head -n 1 >/dev/null"
    done = subprocess.run(["bash", "-c", script], env=node.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 141
    assert done.stderr == ""


# ---- seek in words


def test_seek_takes_times_ids_and_offsets(node: DevNode) -> None:
    node.create("words", "c")
    node.publish("words", "a", "b", "c")
    node.ok("sub", "words", "c", "-n", "3")
    message_id = json.loads(node.ok("peek", "words", "start", "--json").splitlines()[1])["id"]
    for to, offset in (("-1h", 0), ("1", 1), (message_id, 1), ("end", 3), ("@2020-01-01T00:00", 0), ("@-1h", 0)):
        answer = node.json("seek", "words", "c", to, "--yes")
        assert answer["partitions"][0]["to_offset"] == offset, to
        assert answer["done"] is True
    assert node.ok("sub", "words", "c", "-n", "3").split() == ["a", "b", "c"]


# ---- log files


def test_verify_finds_a_flipped_bit(node: DevNode, tmp_path: Path) -> None:
    node.publish("flipped", "first")
    node.publish("flipped", "second")
    copy = tmp_path / "data"
    shutil.copytree(node.folder / "data", copy)
    good = node.json("log", "verify", str(copy), "flipped")
    assert (good["messages"], good["problems"]) == (2, [])
    segment = next((copy / "topics").glob("flipped-*/0/*.segment"))
    data = bytearray(segment.read_bytes())
    data[data.index(b"second")] ^= 1
    segment.write_bytes(data)
    done = node.run("log", "verify", str(copy), "flipped", "--json")
    assert done.returncode == 1
    problem = json.loads(done.stdout)["problems"][0]
    assert (problem["first_offset"], problem["end_offset"]) == (1, 2)
    dumped = node.run("log", "dump", str(copy), "flipped", "--json")
    assert dumped.returncode == 1
    assert '"body": "first"' in dumped.stdout
    assert '"body": "second"' not in dumped.stdout


def test_dump_shows_messages_and_what_channels_did(node: DevNode) -> None:
    node.create("shown", "c")
    node.publish("shown", "a", "b")
    node.ok("seek", "shown", "c", "end", "--yes")
    batches = [json.loads(line) for line in node.ok("log", "dump", "data", "shown/0", "--json").splitlines()]
    frames = [frame for batch in batches for frame in batch["frames"]]
    assert [f["body"] for f in frames if f["type"] == "message"] == ["a", "b"]
    assert [f["event"]["old_floor"] for f in frames if f["type"] == "seek"] == [0]
    listed = [channel for f in frames if f["type"] == "channels" for channel in f["event"]["channels"]]
    assert {tuple(channel[:1] + channel[2:]) for channel in listed} == {("c", False, False)}
    assert [b["log_id"] for b in batches] == list(range(1, len(batches) + 1))
    told = node.ok("log", "dump", "data", "shown")
    assert "old_floor=0" in told
    first = json.loads(node.ok("log", "dump", "data", "shown", "--from", "1", "-n", "1", "--json"))
    assert first["first_offset"] <= 1 < first["first_offset"] + first["count"]


def test_nothing_is_written_by_looking(node: DevNode, tmp_path: Path) -> None:
    node.publish("looked", "x")
    copy = tmp_path / "data"
    shutil.copytree(node.folder / "data", copy)
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    node.ok("log", "verify", str(copy))
    node.ok("log", "dump", str(copy), "looked")
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


# ---- completion


def test_completion_knows_verbs_flags_topics_and_channels(node: DevNode) -> None:
    def words(*given: str) -> list[str]:
        return node.ok("completion", "words", "--", *given).split()

    node.create("completed", "one", "two")
    assert words("to") == ["topic"]
    assert words("topic", "de") == ["delete"]
    assert words("seek", "compl") == ["completed"]
    assert words("seek", "completed", "") == ["one", "two"]
    assert words("seek", "completed", "one", "--pl") == ["--plan"]
    assert words("dev", "--sync", "in") == ["interval"]


def test_completion_is_quiet_where_no_broker_is(node: DevNode) -> None:
    environment = node.environment | {"NSQHA_GRPC_ADDRESS": "127.0.0.1:1"}
    command = [str(BIN / "nsqha"), "completion", "words", "--", "seek", "or"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_bash_script_completes(node: DevNode) -> None:
    typed = "COMP_WORDS=(nsqha topic sho); COMP_CWORD=2"
    script = f'eval "$(nsqha completion bash)"; {typed}; _nsqha; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], env=node.environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "show\n", done.stderr


# ---- what people see


def test_a_topic_shows_the_numbers_behind_its_defaults(node: DevNode) -> None:
    node.create("usual")
    assert "\nretention  1d0h (the node's default); by size: 1.1 GB (the node's default)\n" in node.ok(
        "topic", "show", "usual"
    )
    shown = node.ok("topic", "set", "usual", "--retention", "7d", "--retention-bytes", "unlimited")
    assert "\nretention  7d0h; by size: no limit\n" in shown


def test_tables_are_plain_where_nobody_looks(node: DevNode) -> None:
    for words in (["topic", "list"], ["topic", "show", "orders"], ["channel", "list"], ["stats"], ["peek", "orders"]):
        assert "\x1b" not in node.ok(*words)


def test_a_body_can_not_drive_the_terminal(node: DevNode) -> None:
    node.publish("escapes", "\x1b[2Jgone")
    assert "\\x1b[2Jgone" in node.ok("peek", "escapes")
    assert re.search(r"\\x1b\[2Jgone", node.ok("log", "dump", "data", "escapes"))
