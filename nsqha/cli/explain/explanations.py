"""What this project's words mean: each event of the logs, and each code of a refusal; and what to do about it.

Machines and people read names, never wording (`nsqha.nsqlog`). This is the one table of them: `nsqha explain` and
docs/errors.md come from here, and a test of the tree compares it with the code. `{}` stands for a part that varies.
"""

from __future__ import annotations

from typing import NamedTuple


class Explanation(NamedTuple):
    """What happened, and what to do; "" if there is nothing to do."""

    meaning: str
    remedy: str = ""


LOG_EVENTS: dict[str, dict[str, Explanation]] = {
    "Start and stop": {
        "starting": Explanation("The daemon starts; the line has its version."),
        "node_id": Explanation("The number of `--node-id`. It is only shown."),
        "data": Explanation("The data folder, the sync mode of new topics, and whether compiled functions are used."),
        "data_created": Explanation(
            "The data folder did not exist and was made, empty.",
            "If there should be data: `--data-path` is another one, or its disk is not mounted. Stop, and mend that.",
        ),
        "nsqd_data_ignored": Explanation(
            "The folder holds queues of an nsqd. They are not read.",
            "`nsqha import nsqd DIR` takes them over: docs/moving-from-nsqd.md.",
        ),
        "flag_without_meaning": Explanation("A flag of nsqd is set that has no effect here; the line says why."),
        "option_notice": Explanation("A flag of nsqlookupd is set that has no effect here; the line says why."),
        "listening": Explanation("A port is open."),
        "tcp_listening": Explanation("The TCP port is open."),
        "http_listening": Explanation("The HTTP port is open."),
        "segments_listening": Explanation("The port for readers of segments is open."),
        "start_failed": Explanation(
            "The broker cannot start; the line says what of which file, port or setting.",
            "Mend what it names. Nothing was changed that a start of another version could not read.",
        ),
        "refused": Explanation("The lookup daemon cannot start; the line says why.", "Mend what it names."),
        "stopping": Explanation("The broker was asked to stop, and hands over what it leads."),
        "stopped": Explanation("The daemon has ended, cleanly."),
        "certificates_renewed": Explanation("Certificate files changed, and the new ones are in use."),
        "certificate_expired": Explanation(
            "A certificate that is in use has expired: new connections with it are refused, so that a replica whose "
            "connection ends cannot rejoin.",
            "Replace the files; they are read again within seconds, without a restart.",
        ),
        "certificates_unusable": Explanation(
            "Certificate files changed, and cannot be used. The previous ones stay in use.",
            "Compare key, certificate and authority; write the files again.",
        ),
    },
    "Disks and logs": {
        "disk_low": Explanation(
            "Less than `--disk-low-bytes` are free: publishes are refused (`E_PUB_FAILED`, 503), delivery goes on. "
            "Finished messages stay for `--retention`, for replay: the line says how much they fill, in which topics.",
            "Run the command that the line ends with (`nsqha topic set TOPIC --retention TIME`), free space, lower "
            "`--retention`, or finish what channels hold back (`nsqha topic show`).",
        ),
        "disk_recovered": Explanation("There is room again: publishes are accepted."),
        "disk_hangs": Explanation(
            "An fsync has not ended for ten seconds. Others are to lead what this node leads.",
            "Look at the disk (`dmesg`). The node leads again by itself when rounds end.",
        ),
        "disk_slow": Explanation(
            "Several fsyncs in a row took longer than `--isr-timeout`. Others are to lead.",
            "Look at what else uses the disk, and at the disk.",
        ),
        "disk_goes_on": Explanation("Fsyncs end again; this node may lead."),
        "disk_refuses": Explanation(
            "The disk takes no writes, or there are no descriptors. Others are to lead.",
            "Free space, raise the limit of open files, or mount the disk writable.",
        ),
        "disk_accepts": Explanation("The disk takes writes again; this node may lead."),
        "poisoned": Explanation(
            "An fsync failed, or a data write returned EIO, and the kernel may have dropped what was written; or the "
            "data folder or its files are not at their path any more. The data folder is closed and its partitions are "
            "led elsewhere.",
            "Replace the disk if it is broken, mount the volume if it is away; then start again. Everything is "
            "verified before it counts.",
        ),
        "was_poisoned": Explanation("The folder had been closed after a disk failure. It was verified at this start."),
        "close_failed": Explanation("A partition could not be closed at the stop.", "The next start recovers it."),
        "log_cut": Explanation(
            "What was not committed, or not whole, at the end of a log was removed. Usual after a kill or power loss."
        ),
        "log_damaged": Explanation(
            "Stored batches do not verify. Publishing goes on; channels stop before them.",
            "With replicas it is mended from them. Else restore the files, or `nsqha log skip`: guarantees.md, Damage.",
        ),
        "possible_loss": Explanation(
            "A host went down while its topic did not sync before OK (`--sync=interval` or `none`): messages that were "
            "acknowledged before their fsync may be gone.",
            "Seek the channels of producers that can send again. `sync=always` does not have this.",
        ),
        "events_lost": Explanation(
            "What channels did in a damaged batch is lost: messages may come again, deferred ones may not."
        ),
        "state_unknown": Explanation(
            "The log is damaged where channel state would be read: its channels wait for a repair.",
            "`nsqha log verify` shows where.",
        ),
        "channels_lost": Explanation("Nothing is left that says where channels were: they begin where the log does."),
        "channel_stuck": Explanation(
            "A channel stopped before a damaged range.", "Restore the files, or go on without it: `nsqha log skip`."
        ),
        "read_delayed": Explanation("The disk could not be read just now; tried again.", "If it repeats: the disk."),
        "partition_stopped": Explanation(
            "A partition stopped at an error that must not be; others go on. A traceback follows.",
            "Please report it. A restart opens the partition again.",
        ),
        "cursor_cache_lost": Explanation("The LMDB cache became unreadable. Nothing is lost: it is rebuilt from logs."),
        "cursor_cache_dropped": Explanation("The LMDB cache did not fit the logs. Channel state was read from these."),
        "cursor_cache_failed": Explanation(
            "The LMDB cache cannot be used; channel state is in memory.", "The next start reads more of the logs."
        ),
        "cursor_cache_delayed": Explanation("The cache could not be written; memory holds what changes until it can."),
        "cursor_cache_full": Explanation("The cache cannot grow: the disk is full, or the limit of addresses."),
        "cursor_cache_unreadable": Explanation("What the cache has of a partition was ignored; the log has it."),
        "cursor_cache_recovered": Explanation("The cache is written again."),
        "scrub_damage": Explanation(
            "The scrub found stored batches that do not verify. In a cluster they are fetched from a replica.",
            "One node: restore the files. `nsqha log verify` shows all.",
        ),
        "scrub_damage_more": Explanation("The scrub found more ranges than it lists."),
        "scrub_failed": Explanation("The scrub could not read a log to its end; the next round tries again."),
        "anchor_restored": Explanation("The record before a pair of files was damaged, and was written again."),
        "anchor_delayed": Explanation("The record before a pair of files could not be written; tried again later."),
        "rebuild_delayed": Explanation("A damaged range cannot be mended just now; tried again."),
        "mended_unseen": Explanation("A damaged range could not be looked at after it was mended."),
        "repaired": Explanation("A damaged range was written again, from another replica."),
        "repair_delayed": Explanation("A range could not be fetched from a replica; others are asked, later again."),
        "not_mended": Explanation("A range could not be mended at this leader; tried again."),
        "asked_in_vain": Explanation("Other replicas did not answer what they have of a range in time."),
        "given_up": Explanation(
            "An operator gave a range up that no replica in reach has. Replicas are made without it.",
            "A node that still has it gives it back when it returns.",
        ),
        "sound_again": Explanation("What a recovery doubted was proven whole."),
        "copy_stopped": Explanation(
            "A new replica cannot be made past a damaged range.",
            "Bring back a replica that has it, or `nsqha log skip`.",
        ),
        "unlinked": Explanation("Retention removed files that nothing needs any more."),
        "files_remain": Explanation("Files could not be removed; tried again. They take space only."),
        "files_delayed": Explanation("Log files could not be changed just now; tried again."),
        "retention_delayed": Explanation("Retention could not remove files; tried again."),
        "abandoned": Explanation("A channel that the topic's setting calls abandoned gave up unread messages."),
        "housekeeping_failed": Explanation("A periodic piece of work of a partition failed; tried again."),
        "journal_delayed": Explanation("The node's journal could not be written; promises wait for it.", "The disk."),
        "log_lines_lost": Explanation(
            "Whatever reads standard error is slower than this process writes. The process did not wait for it: as "
            "many lines as the message says are missing here.",
            "Look at what reads it (journald, docker, a pipe) and at its disk; `--log-level=warn` writes less.",
        ),
        "sync_threads_lacking": Explanation(
            "Descriptors or threads were lacking at the first disk round; slower threads make them until a restart.",
            "The limits of the process: ulimit -n, ulimit -u, TasksMax of the unit.",
        ),
        "round_failed": Explanation("A partition could not process the end of a disk round. A traceback follows."),
    },
    "Clients": {
        "command_failed": Explanation("A client's command failed inside the broker. A traceback follows."),
        "auth_failed": Explanation("No auth server gave a usable answer.", "Look at the servers that the line names."),
        "reply_failed": Explanation("A publisher could not be answered; its connection is gone."),
        "consumer_not_informed": Explanation("A consumer could not be told about a partition; its connection ends."),
        "consumers_not_informed": Explanation("Consumers could not be told that a leadership ended."),
        "too_many_files": Explanation(
            "Connections are refused: the rest of the descriptors is for the broker itself.",
            "Raise the limit of open files (`LimitNOFILE=`), or find who connects so often.",
        ),
        "accept": Explanation("A connection could not be accepted: descriptors or memory are short."),
        "tls_refused": Explanation(
            "A TLS handshake of a client failed; the line has its address and the reason, and the client an alert. Of "
            "each address the first has a line; those of the next ten seconds have one together.",
            "`peer did not return a certificate`: give the client one; `unknown ca`: give it the CA of `--tls-cert`.",
        ),
        "connection": Explanation("A connection at the peer port broke before its first stream."),
        "http_request": Explanation("A request over HTTP that was answered."),
        "http_refused": Explanation(
            "A request over HTTP that was refused (400 and above). Of each address the first has a line; those of the "
            "next ten seconds are counted, and have one line together."
        ),
        "http_failed": Explanation("A request failed inside the daemon and got 500. A traceback follows."),
        "dead_letters_wait": Explanation(
            "Dead letters cannot be moved to the topic that the policy names. They stay here, listed.",
            "Make that topic take them (`nsqha topic show`), or name another.",
        ),
        "policy_changed": Explanation("An operator changed the policy of a channel."),
        "statsd_push": Explanation("Figures were sent to statsd."),
        "statsd_failed": Explanation("Figures could not be sent to statsd.", "Look at `--statsd-address`."),
        "reader_refused": Explanation("A reader of segments was refused; the line says why."),
        "slow_reader_replaced": Explanation(
            "All places for readers of segments were taken; one that read slowly was ended for another one.",
            "Read faster, from another replica, or with fewer readers at once.",
        ),
        "reader_failed": Explanation("Sending a segment failed. A traceback follows."),
        "reader_gone": Explanation("A reader closed its connection."),
        "snapshot_failed": Explanation("A partition could not be pinned for a reader of segments."),
        "hold_not_released": Explanation("A hold of a snapshot that failed stays until its end."),
        "hold_not_renewed": Explanation("A hold could not be renewed; the next read tries again."),
        "rpc_failed": Explanation("An administration call failed inside the broker. A traceback follows."),
    },
    "Who may do what": {
        "open_to_everybody": Explanation(
            "A port beyond loopback serves whoever reaches it.",
            "`--access-file`: docs/access.md. Or a trusted network.",
        ),
        "access_refused": Explanation("A token, a certificate or a caller without one may not do what it asked for."),
        "access_renewed": Explanation("The access file changed, and counts."),
        "access_unusable": Explanation(
            "The access file changed, and cannot be used; the line says why. The last good one stays in force.",
            "`nsqha access check FILE`.",
        ),
        "access_token_expired": Explanation(
            "A token has expired and is refused.", "`nsqha access token` makes another; remove it from the file."
        ),
        "admin_action": Explanation("The audit: who changed what, from where, and what came of it."),
        "audit_refusals_unrecorded": Explanation(
            "So many changes are refused that not each has a record; metrics count them.",
            "Who asks? `access_refused` names addresses.",
        ),
        "audit_lost": Explanation(
            "The audit topic did not take a record; the change went on, and the log has it.",
            "Look at that topic: `nsqha topic show`.",
        ),
        "audit_copy_failed": Explanation(
            "A change of the audit topic is not in the log of another node. The node that was asked has it.",
            "Start or upgrade the node that the line names.",
        ),
    },
    "Topics and channels": {
        "topic_created": Explanation("A topic was created."),
        "topic_deleted": Explanation("A topic was deleted."),
        "topic_left": Explanation(
            "A deletion meant this node alone, as a lookup daemon hides it for the topic (nsqadmin's tombstone): the "
            "data stay, and others lead."
        ),
        "partitions_added": Explanation("A topic got more partitions."),
        "channel_created": Explanation("A channel was created."),
        "channel_deleted": Explanation("A channel was deleted."),
        "change_not_delivered": Explanation("A change of a topic did not reach all of this node. Traceback follows."),
    },
    "Lookup daemons, as a broker sees them": {
        "lookupd_added": Explanation("A lookup daemon was configured."),
        "lookupd_removed": Explanation("A lookup daemon was removed from the configuration."),
        "lookupd_not_registered": Explanation(
            "The broker listens on a unix socket, or not over HTTP: lookup daemons are not told of it, as they would "
            "send consumers to a port that is none.",
            "Consumers connect to it directly. Behind a proxy, set --broadcast-tcp-port and --broadcast-http-port.",
        ),
        "lookupd_connected": Explanation("The broker registered with a lookup daemon."),
        "lookupd_lost": Explanation("A lookup daemon does not answer; tried again.", "Consumers use the others."),
        "lookupd_channels_failed": Explanation("A lookup daemon did not say which channels a new topic begins with."),
        "lookupd_channels_too_many": Explanation("A topic begins with only as many channels as one may have."),
        "first_channels_delayed": Explanation(
            "Channels that lookup daemons know of a new topic could not be stored; tried again, they get all messages.",
            "The reason is in the line: is the disk full?",
        ),
        "loopback_registered": Explanation(
            "An address is registered that only this host reaches.", "Listen on 0.0.0.0, or on the broadcast address."
        ),
    },
    "Leaders and replicas": {
        "registered": Explanation("The node is a member of the cluster."),
        "joined": Explanation("A majority of the brokers, and the controller, have been connected with this node."),
        "join_incomplete": Explanation(
            "This node gets no new replicas and is not ready: the line says which connections it lacks.",
            "Look at the side that is named: its address, port, certificate and secret. It is tried again by itself.",
        ),
        "join_delayed": Explanation("The node cannot register yet; tried again.", "Is etcd there? Is a clone running?"),
        "lease_lost": Explanation(
            "The node's lease in etcd ended; it joins again. Its leaderships may be elsewhere.",
            "Was the process stopped, or the host overloaded? etcd slow?",
        ),
        "not_announced": Explanation("A state of this node (leaving, closed, clock) is not known in etcd yet."),
        "directory_not_counted": Explanation("The count of uses of the folder could not be raised in etcd yet."),
        "old_directory": Explanation(
            "The data folder is an older copy: it was put back, as from a snapshot of a machine. Its logs are compared "
            "with the other replicas before one of them may be elected."
        ),
        "elected": Explanation("The metadata name this node as a leader; `leading` or `not_leading` follows."),
        "leading": Explanation("This node leads a partition and takes publishes."),
        "epoch_begun": Explanation("The first batch of an epoch is committed: deliveries begin."),
        "not_leading": Explanation("The metadata name this node, and it cannot lead; another is elected."),
        "stepping_down": Explanation("A leadership ended; the line says why."),
        "leadership_failed": Explanation("A leadership ended at an error. A traceback follows."),
        "handing_over": Explanation("A leader passes the lead on to a replica that has everything."),
        "transfer_given_up": Explanation("A hand-over was called off; this node goes on."),
        "isr_{}": Explanation(
            "A leader asked the metadata for another in-sync replica set: `isr_shrink` (a member is silent or behind), "
            "`isr_expand`, `isr_swap`; the line says why.",
            "Shrinks that repeat: the network, or the disk of that member.",
        ),
        "fenced": Explanation("A replica has promised a later epoch: this leader's time is over."),
        "leader_unheard": Explanation(
            "Nothing is heard of the node that leads partitions followed here, for a second. If the controller hears "
            "nothing either, another is elected.",
            "If it repeats: is that host overloaded, or its link bad?",
        ),
        "leader_heard": Explanation("The leader is heard again, or leads nothing here any more."),
        "following": Explanation("This node follows a leader."),
        "open_failed": Explanation("A leader's stream could not be taken. A traceback follows; it tries again."),
        "push_lost": Explanation("The stream to a follower ended; it is opened again."),
        "push_refused": Explanation("A push was refused, as it is of a leader or log that does not count any more."),
        "push_stopped": Explanation("Batches cannot be sent to a follower. A traceback or the reason follows."),
        "catch_up_delayed": Explanation("A replica could not fetch what it lacks; tried again."),
        "log_replaced": Explanation("The leader has no batches from where this replica ends: it begins later."),
        "committed_cut": Explanation(
            "This replica's log differs from the leader's below what it knew as committed. It was given up; the "
            "leader's counts.",
            "Look for `possible_loss`, an unclean election, or a folder that was put back.",
        ),
        "refetching": Explanation("What is damaged of a replica is fetched again."),
        "whole_again": Explanation("A doubted log was proven equal to the leader's."),
        "state_diverged": Explanation(
            "A partition's channel state does not fit its log. The replica leaves the in-sync set, and the state is "
            "rebuilt from the log. No message is lost; some may come again.",
            "Please report it, with the log lines around it.",
        ),
        "apply_delayed": Explanation("A replica's channel state waits: the disk, or a damaged batch."),
        "replica_unusable": Explanation("A replica cannot be opened; the line says why.", "Others go on without it."),
        "replica_removed": Explanation("A replica was moved away, and its files removed."),
        "role_delayed": Explanation("A change of role could not be carried out; tried again."),
        "role_failed": Explanation("A change of role failed at an error; tried again. A traceback follows."),
        "task_failed": Explanation("A background task ended at an error. A traceback follows.", "Please report it."),
        "metadata_unavailable": Explanation("etcd did not answer a leader; tried again."),
        "metadata_failed": Explanation("A change of metadata failed at an error. A traceback follows; tried again."),
        "outcome_unknown": Explanation("etcd did not say whether a change was made: it is read again."),
        "records_delayed": Explanation("Records could not be read; tried again."),
        "records_failed": Explanation("Records could not be processed; tried again. A traceback follows."),
        "forward_ended": Explanation("The stream by which publishes are forwarded to a leader ended."),
        "relay_ended": Explanation("The stream by which consumers here get messages of another node ended."),
        "leader_hinted": Explanation("etcd is away; other nodes say who leads: publishes go there."),
        "no_hint": Explanation("A node could not be asked who leads."),
    },
    "Between nodes": {
        "greeting_refused": Explanation(
            "A process at the other end speaks another protocol level, or has another secret or cluster.",
            "docs/cluster.md: rolling a cluster; compare `--cluster-secret-file` and `--cluster-name`.",
        ),
        "stranger_refused": Explanation("A caller has no certificate of this cluster, or no role for the call."),
        "secret_refused": Explanation("A caller does not have the cluster's secret."),
        "peer_refused": Explanation("A stream of a node was refused; the line says why."),
        "peer_stream_silent": Explanation("A stream was opened and never began; it was closed."),
        "peer_call_failed": Explanation("A call of a node failed here. A traceback follows."),
        "peer_stream_failed": Explanation("A stream ended at an error. A traceback follows; it is opened again."),
        "peer_message_bad": Explanation("A node sent what does not decode; its stream was closed."),
        "peer_message_too_large": Explanation("A message does not fit into what nodes send each other."),
        "peer_handler_failed": Explanation("A message of a node could not be processed. A traceback follows."),
    },
    "Clocks": {
        "clock_set": Explanation("The wall clock was set by a large step: nothing goes for its age for a while."),
        "clock_skew": Explanation(
            "This clock is further off than `--max-clock-skew` from most nodes': it does not lead.", "Set it (NTP)."
        ),
        "clock_agrees": Explanation("This clock is right again; the node may lead."),
        "clocks_disagree": Explanation(
            "No majority of clocks agrees, in five checks, or most are unknown for a minute: time-based retention is "
            "paused.",
            "Set the clocks (NTP).",
        ),
        "clock_trusted": Explanation("The clock is believed again."),
    },
    "The controller, in a lookup daemon": {
        "controller_began": Explanation("This process is the controller: it elects leaders and places replicas."),
        "controller_ended": Explanation("Another process is the controller now, or will be."),
        "controller_reached": Explanation("This process stands by, beside the controller."),
        "controller_gone": Explanation("The controller's process ended; another takes over."),
        "controller_resigns": Explanation("The controller cannot reach members that others reach: another may."),
        "controller_paused": Explanation("etcd does not let this process campaign; tried again.", "Look at etcd."),
        "controller_failed": Explanation("The controller stopped at an error; it begins again. A traceback follows."),
        "change_refused": Explanation("A change of the controller was overtaken by another; it looks again."),
        "record_unreadable": Explanation("A record does not decode: nothing is decided about it.", "An older build?"),
        "channels_unknown": Explanation("A node could not be asked which channels a topic begins with."),
        "metadata_trouble": Explanation("etcd has trouble; the line says what."),
        "lookup_client": Explanation("An nsqd connected to this lookup daemon."),
        "lookup_silent": Explanation("An nsqd was silent for too long; its connection was closed."),
        "lookup_client_gone": Explanation("An nsqd's connection to this lookup daemon ended."),
    },
    "Metadata in doubt": {
        "etcd": Explanation("etcd has trouble; the line says what. Serving goes on; nothing changes its role."),
        "metadata_in_doubt": Explanation(
            "etcd is another one, or older than what this node has seen: no leader or replica is changed.",
            "`nsqha cluster accept-metadata`: docs/cluster.md.",
        ),
        "metadata_stale": Explanation("The controller's etcd is older than before: nothing is decided by it."),
        "metadata_believed": Explanation("An operator accepted the metadata as they are."),
        "begins_again": Explanation("An operator decides on the metadata; this node starts again and waits."),
        "doubt_delayed": Explanation("This node could not say in etcd that it doubts the metadata; tried again."),
        "held": Explanation("All logs are recovered, and the node waits for an operator to accept the metadata."),
        "logs_unknown": Explanation("The folder has logs of a topic that the metadata do not know. They stay."),
        "seen_unreadable": Explanation("The copy of a record that this node had seen does not decode; it is ignored."),
        "topic_rebuilt": Explanation("A topic was rebuilt from its log; its settings and policies are the defaults."),
        "stray_folder": Explanation("A folder is not one of a topic; it is ignored."),
        "partitions_missing": Explanation("A topic's folder lacks partitions and is ignored.", "Look for the others."),
    },
}

V2_CODES: dict[str, Explanation] = {
    "E_BAD_PROTOCOL": Explanation("The connection did not begin with `  V2`.", "An HTTP client on the TCP port?"),
    "E_INVALID": Explanation("The command is unknown, malformed, out of its range, or not allowed in this state."),
    "E_BAD_BODY": Explanation("A body is malformed or larger than its limit."),
    "E_BAD_MESSAGE": Explanation("A message is empty, or larger than `--max-msg-size`."),
    "E_BAD_TOPIC": Explanation("The name is not 1 to 64 of `. a-z A-Z 0-9 _ -`, optionally with `#ephemeral`."),
    "E_BAD_CHANNEL": Explanation("As E_BAD_TOPIC, of a channel."),
    "E_BAD_PARTITION": Explanation("The partition that the command names does not exist.", "`nsqha topic show`."),
    "E_TOPIC_NOT_EXIST": Explanation(
        "As E_BAD_PARTITION, to clients of the Youzan fork: they look the topic up again.", "`nsqha topic show`."
    ),
    "E_AUTH_FIRST": Explanation("The broker, or the lookup daemon, wants AUTH before this command."),
    "E_AUTH_FAILED": Explanation(
        "A wrong or expired token, or no auth server answered usably. At a lookup daemon: or another cluster's secret."
    ),
    "E_AUTH_DISABLED": Explanation("AUTH was sent, and the broker or lookup daemon asks for none."),
    "E_UNAUTHORIZED": Explanation("The secret of AUTH does not allow this."),
    "E_{}_FAILED": Explanation(
        "PUB, MPUB, DPUB, SUB: `not stored` is certain; `outcome unknown` is not: sending again may make it twice. "
        "FIN, REQ, TOUCH: the message is not in flight at this client any more (its time-out, an operator, a new "
        "leader); the connection stays."
    ),
}

HTTP_CODES: dict[str, Explanation] = {
    "TOPIC_NOT_FOUND": Explanation("There is no such topic, or the topic has no such partition."),
    "CHANNEL_NOT_FOUND": Explanation("There is no such channel."),
    "MESSAGE_NOT_FOUND": Explanation("No message of the topic, or of the partition that is named, has this id."),
    "NODE_NOT_FOUND": Explanation("There is no such node."),
    "NOT_FOUND": Explanation("There is no such route."),
    "METHOD_NOT_ALLOWED": Explanation("The route wants another method."),
    "MISSING_ARG_{}": Explanation("The request lacks a parameter."),
    "INVALID_ARG_{}": Explanation(
        "A parameter has a value that it cannot have, or narrows a change that cannot be narrowed; `detail` or `why` "
        "says more."
    ),
    "INVALID_REQUEST": Explanation("The query or body does not parse."),
    "INVALID_TOPIC": Explanation("The topic's name is none."),
    "INVALID_DEFER": Explanation("The value of `defer` is not a number of milliseconds up to `--max-req-timeout`."),
    "INVALID_OPTION": Explanation("There is no such setting, or it cannot be changed while running."),
    "INVALID_VALUE": Explanation("The setting does not take this value."),
    "INVALID_POLICY": Explanation("A field of the policy is unknown or has a wrong value; nothing was stored."),
    "MSG_EMPTY": Explanation("The body is empty."),
    "MSG_TOO_BIG": Explanation("The body is larger than `--max-msg-size`."),
    "BODY_TOO_BIG": Explanation("The body is larger than `--max-body-size`."),
    "BAD_BODY": Explanation("The binary /mpub body is malformed or too large."),
    "BAD_MESSAGE": Explanation("A message of the binary /mpub body is too large or empty."),
    "TLS_REQUIRED": Explanation("This port does not serve without TLS (`--tls-required`)."),
    "UNAUTHORIZED": Explanation("There is no token, or the access file does not have it.", "docs/access.md."),
    "FORBIDDEN": Explanation(
        "The token or certificate does not have the role that this needs; of PUT /config also: the address is none of "
        "`--allow-config-from-cidr`.",
        "`detail` names the role: docs/access.md.",
    ),
    "TOO_MANY_WRONG_TOKENS": Explanation("Too many wrong tokens came from this address.", "Try again in a second."),
    "CROSS_SITE": Explanation("A web page of another site asked for a change."),
    "CONFLICT": Explanation("It exists already, or was changed meanwhile.", "Read it again."),
    "LIMIT_REACHED": Explanation("A limit on their number is reached; `detail` names its setting."),
    "TOO_MANY_NAMES": Explanation("The lookup daemon holds as many names as it may."),
    "UNAVAILABLE": Explanation("Not now, and nothing was done: disk low, no leader, too few in sync.", "Try again."),
    "EXITING": Explanation("The broker stops.", "Try another."),
    "METADATA_UNAVAILABLE": Explanation("etcd does not answer the lookup daemon."),
    "OUTCOME_UNKNOWN": Explanation("It may or may not have been done in time.", "Look, before you do it again."),
    "INTERNAL_ERROR": Explanation("It failed inside; the log has why."),
}

GRPC_STATUSES: dict[str, Explanation] = {
    "NOT_FOUND": Explanation("A topic, channel, message or node does not exist."),
    "RESOURCE_EXHAUSTED": Explanation("A limit on their number is reached; the text names its setting."),
    "FAILED_PRECONDITION": Explanation("The channel is a reader's, or is not one; or the topic is a later one."),
    "ALREADY_EXISTS": Explanation("It exists already, or was changed meanwhile.", "Read it again."),
    "UNAVAILABLE": Explanation("Not now, and nothing was done.", "Try again."),
    "UNKNOWN": Explanation("The outcome is not known.", "Look, before you do it again."),
    "DATA_LOSS": Explanation("Stored bytes do not verify.", "guarantees.md, Damage."),
    "INTERNAL": Explanation("The disk refused, or it failed inside; the log has why."),
    "INVALID_ARGUMENT": Explanation("A field has a value that it cannot have; the text names it."),
}


def explanations() -> dict[str, Explanation]:
    """All of them, by name; a name that is on several surfaces means the same."""
    found = dict(GRPC_STATUSES) | HTTP_CODES | V2_CODES
    for events in LOG_EVENTS.values():
        found |= events
    return found


def explain(word: str) -> Explanation | None:
    """What this name means; also a name of which the table has the form only, as `MISSING_ARG_TOPIC`."""
    table = explanations()
    if word in table:
        return table[word]
    for name, explanation in table.items():
        before, varies, after = name.partition("{}")
        if varies and word.startswith(before) and word.endswith(after) and len(word) > len(before + after):
            return explanation
    return None
