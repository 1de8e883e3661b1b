"""What `nsqha --help` lists. The verb itself is the module of that name, or `command` in the package of that name,
imported only when it is called."""

from __future__ import annotations

VERBS = {
    "dev": "run a broker, or a whole cluster, on this machine without configuration",
    "broker": "run one node of a cluster",
    "lookupd": "run a lookup daemon; with an etcd also a controller of the cluster",
    "cluster": "show a cluster; move, empty and balance nodes; elect leaders",
    "topic": "list, show, create, change, pause, empty and delete topics",
    "channel": "list, show, create, change, pause, empty and delete channels",
    "dead": "list, requeue and purge the dead letters of a channel",
    "message": "list, show, finish, requeue, defer and kill single messages of a channel",
    "seek": "move a channel: replay or skip messages",
    "peek": "show stored messages; no channel is changed",
    "pub": "publish messages",
    "sub": "print the messages of a channel and finish them",
    "tail": "print what is published from now on",
    "stats": "show the node, its topics and its channels",
    "spark": "jobs that read the log in parallel: archive, backfill, verify and compact a lake, replay, lag",
    "import": "take over topics, channels and queued messages of an nsqd",
    "access": "tokens of the access file: make one, check the file",
    "log": "dump and verify log files, offline; let channels continue behind damage",
    "check": "check a node, the cluster or a channel, with the exit statuses of monitoring",
    "config": "show the settings of a daemon, and where each comes from",
    "explain": "say what a log event or the code of a refusal means, and what to do",
    "generate": "write man pages, completion and deployment files",
    "completion": "print a script that completes words in a shell",
}

_PACKAGES = ("dev", "explain", "cluster", "channel", "message", "spark", "generate", "check", "access")
_ELSEWHERE = {"import": "imports.command", "dead": "message.dead"}


def module_of(verb: str) -> str:
    """The module that has `add_parser` of the verb."""
    usual = f"{verb}.command" if verb in _PACKAGES else verb
    return f"nsqha.cli.{_ELSEWHERE.get(verb, usual)}"
