---------------------------- MODULE Replication ----------------------------
(***************************************************************************
Replication of one partition: nothing that was acknowledged is ever lost or
changed, whoever crashes, comes back or is elected.

MODELLED
  - Three replicas, each with a log of <<leader epoch, value>> entries. What
    is written and what is on the disk are two things; a crash keeps any
    length between them.
  - The push of a leader to a follower, with the cut of what diverges, the
    durable promise of an epoch, and what the leader knows of a follower,
    which may be old.
  - The metadata record as one linearizable record with a version. A leader's
    compare-and-set is a request that may be applied at any later time, also
    after its sender crashed, was deposed or gave up; a sender that does not
    learn the outcome fences the request before it goes on.
  - Election by a controller that may be wrong about who is dead: any member
    that may be elected is elected at any time. No clock, no lease: safety
    does not rest on them.
  - Crash, kill, power cut, an emptied disk, restart; several leaders at once
    that do not know of each other.

NOT MODELLED
  - Messages that are lost or late one by one: a push is one step, so an
    answer can only be old, not missing. A missing answer leaves less to do.
  - Change of replicas, retention and trimming of the log, corruption of what
    was durable, MinIsr or more disks that lost something at a time, leases.
  - Channels: their state is entries of the same log.
  - Liveness. Only what must never happen is checked.

HOW ACTIONS MAP TO CODE (one partition; one entry here is one batch there)
  Write       the leader's flush: nsqha.server.Partition, PartitionLog.append
  Push        the follower takes batches off the push stream, fdatasyncs, and
              its acknowledgement arrives; also catch-up. One Push an entry
  Sync        the disk round of a node ends
  Commit      nsqha.replication.LeaderReplica moves `committed` by one
  Elect       the controller's compare-and-set of leader and leader epoch
  HandOver    the same by the leader, which shuts down or has a successor: it
              is asked for and fenced as a change of the ISR is
  FenceIsr    the controller takes a dead follower out of the ISR
  Become      the elected node has promised its epoch durably and leads
  Hear        a follower has heard of the epoch, and promises it before its leader asks
  Refresh     a leader reads the record again within its epoch
  Shrink, Expand, Swap
              the leader asks for another ISR: a member leaves, a replica that
              caught up joins, both at once where the floor forbids to leave
  EtcdApply   etcd takes or refuses that compare-and-set
  Reply       the leader learns which
  FenceRequest
              it does not: it writes the record itself, unchanged, which gives
              it a version that the request can not match
  Crash       power cut of a running node;  Kill  kill -9, the page cache lives
  Power       then the machine of a killed node loses power as well
  Wipe        the data directory is gone, the node's name stays
  Restart     nsqha.commitlog.recovery, then registration with the metadata

The same actions, as Python over recorded traces of the simulation, are in
tests/sim/spec_trace.py. A change here is a change there; a test compares
the number of distinct states both of them reach.
***************************************************************************)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
  Replicas,   \* the nodes that hold the partition
  None,       \* no node
  MinIsr,     \* the ISR floor, and what a commit needs
  FsyncAck,   \* TRUE: sync=always. FALSE: sync=interval or none
  \* bounds that make the state space finite
  MaxEpoch, MaxValue, MaxCrash, MaxVersion,
  \* faults that a configuration switches on
  AllowKill, AllowWipe, AllowFailedWrite,
  AllowUnknown,            \* leaders do not always learn the outcome of a request
  AllowRenew,              \* a restart may take a new log_uid without need
  AllowHandOver,           \* no fault: leaders name the next one themselves
  \* mutants: each switches one rule off, and an invariant must notice
  MutNoPromise,            \* followers do not promise epochs
  MutDuplicateByPosition,  \* "have it already" is decided by log id alone
  MutProposedIsr,          \* commit on the proposed ISR, not the maximal one
  MutLossyElectable,       \* a log that lost entries keeps its log_uid
  MutBelowMinIsr,          \* writes and commits below MinIsr
  MutAnyRegistration,      \* a join does not compare the registration
  MutNoFloor,              \* members leave below the floor
  MutResumeEpoch,          \* a restarted leader goes on in its epoch
  MutNoRecoverySync,       \* recovery does not fdatasync what it found
  MutNoFence,              \* on an unknown outcome the leader believes what it reads
  MutReuseLogId            \* a failed local write after the push: id used again

VARIABLES
  metadata,      \* [leader, epoch, isr, stale, version] in etcd. `stale`: members
                 \* whose log_uid is no longer the one that the ISR names
  registration,  \* replica -> which life of its process this is
  log,           \* replica -> sequence of <<epoch, value>>
  durable,       \* replica -> length of the log that a power cut leaves
  synced,        \* replica -> length that the node itself takes for durable
  promise,       \* replica -> highest epoch it has promised, durably
  up,            \* replica -> is its process running
  leading,       \* replica -> what it believes of its leadership, see NotLeading
  match,         \* leader -> follower -> log end that the leader knows to be acked
  seen,          \* leader -> follower -> registration that ack came with, 0: none
  requests,      \* compare-and-sets of leaders that are under way
  acked,         \* history: all <<log id, entry>> ever acknowledged to a client
  next_value,    \* the next value to publish
  crashes,       \* how many crashes there were
  lossy          \* replicas that lost what they had acknowledged, until they join again

vars == <<metadata, registration, log, durable, synced, promise, up, leading, match, seen,
          requests, acked, next_value, crashes, lossy>>

\* maximal: the effective ISR, every set that may be in force. committed: the high
\* watermark of this leadership. epoch_start: log end when it began. waiting: for a reply.
NotLeading == [on |-> FALSE, epoch |-> 0, isr |-> {}, maximal |-> {}, version |-> 0,
               committed |-> 0, epoch_start |-> 0, waiting |-> FALSE]

Init ==
  /\ \E l \in Replicas : metadata = [leader |-> l, epoch |-> 1, isr |-> Replicas, stale |-> {}, version |-> 1]
  /\ registration = [r \in Replicas |-> 1]
  /\ log = [r \in Replicas |-> <<>>]
  /\ durable = [r \in Replicas |-> 0]
  /\ synced = [r \in Replicas |-> 0]
  /\ promise = [r \in Replicas |-> 0]
  /\ up = [r \in Replicas |-> TRUE]
  /\ leading = [r \in Replicas |-> NotLeading]
  /\ match = [r \in Replicas |-> [s \in Replicas |-> 0]]
  /\ seen = [r \in Replicas |-> [s \in Replicas |-> 0]]
  /\ requests = {} /\ acked = {} /\ next_value = 1 /\ crashes = 0 /\ lossy = {}

Min(a, b) == IF a < b THEN a ELSE b

Epochs(entries) == [i \in 1..Len(entries) |-> entries[i][1]]

\* Where two logs part. With failed writes the same (epoch, log id) could have two
\* contents, and a follower that looks at the numbers alone does not see it.
CommonPrefix(a, b) ==
  LET same(n) == IF AllowFailedWrite
                 THEN SubSeq(Epochs(a), 1, n) = SubSeq(Epochs(b), 1, n)
                 ELSE SubSeq(a, 1, n) = SubSeq(b, 1, n)
      lengths == {n \in 0..Min(Len(a), Len(b)) : same(n)}
  IN CHOOSE n \in lengths : \A m \in lengths : m <= n

EnoughMembers(l) == MutBelowMinIsr \/ Cardinality(leading[l].isr) >= MinIsr
FloorKept(isr) == MutNoFloor \/ Cardinality(isr) >= MinIsr

(****************************** data **************************************)

\* The leader appends one batch to its own log, in the page cache.
Write(l) ==
  /\ leading[l].on /\ up[l] /\ next_value <= MaxValue /\ EnoughMembers(l)
  /\ log' = [log EXCEPT ![l] = Append(@, <<leading[l].epoch, next_value>>)]
  /\ next_value' = next_value + 1
  /\ UNCHANGED <<metadata, registration, durable, synced, promise, up, leading, match, seen,
                 requests, acked, crashes, lossy>>

\* Follower f cuts what diverges from leader l, takes the next entry if there is one
\* (none: a heartbeat), promises l's epoch, and l learns f's log end and registration.
\* With sync=always f's answer waits for its disk. A leader of an older epoch that is
\* pushed to steps down; f refuses an epoch below its promise.
Push(l, f) ==
  /\ l # f /\ leading[l].on /\ up[l] /\ up[f]
  /\ (MutNoPromise \/ leading[l].epoch >= promise[f])
  /\ ~(leading[f].on /\ leading[f].epoch >= leading[l].epoch)
  /\ LET cp == CommonPrefix(log[l], log[f])
         new == IF MutDuplicateByPosition
                THEN IF Len(log[f]) < Len(log[l]) THEN Append(log[f], log[l][Len(log[f]) + 1]) ELSE log[f]
                ELSE SubSeq(log[f], 1, cp) \o SubSeq(log[l], cp + 1, Min(cp + 1, Len(log[l])))
     IN /\ log' = [log EXCEPT ![f] = new]
        /\ synced' = [synced EXCEPT ![f] = IF new # log[f] THEN Len(new) ELSE @]
        /\ durable' = [durable EXCEPT ![f] = IF FsyncAck /\ new # log[f] THEN Len(new) ELSE Min(@, Len(new))]
        /\ match' = [match EXCEPT ![l][f] = Min(IF FsyncAck THEN synced'[f] ELSE Len(new), Len(log[l]))]
  /\ promise' = [promise EXCEPT ![f] = IF MutNoPromise THEN @ ELSE leading[l].epoch]
  /\ seen' = [seen EXCEPT ![l][f] = registration[f]]
  /\ leading' = [leading EXCEPT ![f] = NotLeading]
  /\ UNCHANGED <<metadata, registration, up, requests, acked, next_value, crashes, lossy>>

\* A disk round: everything written is durable, and the node knows.
Sync(r) ==
  /\ up[r] /\ synced[r] < Len(log[r])
  /\ durable' = [durable EXCEPT ![r] = Len(log[r])]
  /\ synced' = [synced EXCEPT ![r] = Len(log[r])]
  /\ UNCHANGED <<metadata, registration, log, promise, up, leading, match, seen, requests, acked,
                 next_value, crashes, lossy>>

\* Every member of the maximal ISR has the next entry: it is acknowledged to the client.
\* The own disk counts as one more replica.
Commit(l) ==
  /\ leading[l].on /\ up[l] /\ leading[l].committed < Len(log[l])
  /\ LET n == leading[l].committed + 1 IN
     /\ \A s \in leading[l].maximal \ {l} : match[l][s] >= n
     /\ EnoughMembers(l)
     /\ (FsyncAck => synced[l] >= n)
     /\ acked' = acked \cup {<<n, log[l][n]>>}
     /\ leading' = [leading EXCEPT ![l].committed = n]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, promise, up, match, seen, requests,
                 next_value, crashes, lossy>>

(********************* election and the ISR *******************************)

\* The controller names a leader for the next epoch, out of the ISR and with the
\* log_uid that the ISR names. It may be wrong that the old leader is gone, which
\* leaves the ISR too unless the controller keeps it or the floor does.
Elect(n, keep) ==
  /\ metadata.epoch < MaxEpoch /\ metadata.version < MaxVersion
  /\ (n = metadata.leader => ~leading[n].on)
  /\ n \in metadata.isr \ metadata.stale
  /\ LET rest == metadata.isr \ {metadata.leader}
         isr == IF metadata.leader \in {None, n} \/ keep \/ ~FloorKept(rest) THEN metadata.isr ELSE rest
     IN metadata' = [metadata EXCEPT !.leader = n, !.epoch = @ + 1, !.isr = isr, !.stale = @ \cap isr,
                                     !.version = @ + 1]
  /\ UNCHANGED <<registration, log, durable, synced, promise, up, leading, match, seen, requests, acked,
                 next_value, crashes, lossy>>

\* The controller takes a dead member that does not lead out of the ISR.
FenceIsr(s) ==
  /\ ~up[s] /\ s \in metadata.isr /\ s # metadata.leader /\ metadata.version < MaxVersion
  /\ LET isr == metadata.isr \ {s}
     IN /\ FloorKept(isr)
        /\ metadata' = [metadata EXCEPT !.isr = isr, !.stale = @ \cap isr, !.version = @ + 1]
  /\ UNCHANGED <<registration, log, durable, synced, promise, up, leading, match, seen, requests, acked,
                 next_value, crashes, lossy>>

\* The elected node promises the epoch, durably, and leads. An epoch it has promised
\* before it never leads: one process life leads an epoch, and a restarted leader
\* would not know of the requests that its former life sent.
Become(n) ==
  /\ up[n] /\ metadata.leader = n /\ n \notin metadata.stale
  /\ (~leading[n].on \/ leading[n].epoch < metadata.epoch)
  /\ (promise[n] < metadata.epoch \/ (MutResumeEpoch /\ promise[n] = metadata.epoch))
  /\ leading' = [leading EXCEPT ![n] =
       [on |-> TRUE, epoch |-> metadata.epoch, isr |-> metadata.isr, maximal |-> metadata.isr,
        version |-> metadata.version, committed |-> 0, epoch_start |-> Len(log[n]), waiting |-> FALSE]]
  /\ promise' = [promise EXCEPT ![n] = metadata.epoch]
  /\ match' = [match EXCEPT ![n] = [s \in Replicas |-> 0]]
  /\ seen' = [seen EXCEPT ![n] = [s \in Replicas |-> 0]]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, up, requests, acked, next_value, crashes, lossy>>

\* Another node is elected. The epoch exists, whoever leads it, so its promise may be
\* given before it is asked for. (The elected node begins its own while it still reads the
\* record: until it leads that is no more than a later Become, or one that a crash undid.)
Hear(r) ==
  /\ up[r] /\ ~leading[r].on /\ metadata.leader # r /\ promise[r] < metadata.epoch
  /\ promise' = [promise EXCEPT ![r] = metadata.epoch]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, up, leading, match, seen, requests, acked,
                 next_value, crashes, lossy>>

\* The leader reads the record again and finds that the controller changed the ISR.
\* Not while a request of its own is under way: its sets may still come into force.
Refresh(l) ==
  /\ up[l] /\ leading[l].on /\ ~leading[l].waiting
  /\ metadata.leader = l /\ metadata.epoch = leading[l].epoch /\ metadata.version > leading[l].version
  /\ leading' = [leading EXCEPT ![l].isr = metadata.isr, ![l].maximal = metadata.isr, ![l].version = metadata.version]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, promise, up, match, seen, requests, acked,
                 next_value, crashes, lossy>>

\* `added` joins with the registration that its last acknowledgement came with.
Request(l, isr, added) ==
  [leader |-> l, epoch |-> leading[l].epoch, isr |-> isr, version |-> leading[l].version, added |-> added,
   registration |-> IF added = None THEN 0 ELSE seen[l][added], heir |-> None, status |-> "sent"]

\* The leader asks to take member s out. It goes on needing s until it knows the outcome.
Shrink(l, s) ==
  /\ up[l] /\ leading[l].on /\ ~leading[l].waiting /\ metadata.version < MaxVersion
  /\ s # l /\ s \in leading[l].isr /\ FloorKept(leading[l].isr \ {s})
  /\ requests' = requests \cup {Request(l, leading[l].isr \ {s}, None)}
  /\ leading' = [leading EXCEPT ![l].waiting = TRUE,
                                ![l].maximal = IF MutProposedIsr THEN leading[l].isr \ {s} ELSE @]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, promise, up, match, seen, acked,
                 next_value, crashes, lossy>>

\* It has all that was committed, and all that the leader began its epoch with.
CaughtUp(l, s) ==
  match[l][s] >= leading[l].committed /\ match[l][s] >= leading[l].epoch_start /\ seen[l][s] # 0

\* The leader asks to take replica s in, and needs its acknowledgements from now on.
\* A member that came back with another log_uid joins anew.
Expand(l, s) ==
  /\ up[l] /\ leading[l].on /\ ~leading[l].waiting /\ metadata.version < MaxVersion
  /\ s # l /\ (s \notin leading[l].isr \/ s \in metadata.stale) /\ CaughtUp(l, s)
  /\ requests' = requests \cup {Request(l, leading[l].isr \cup {s}, s)}
  /\ leading' = [leading EXCEPT ![l].waiting = TRUE,
                                ![l].maximal = IF MutProposedIsr THEN @ ELSE @ \cup {s}]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, promise, up, match, seen, acked,
                 next_value, crashes, lossy>>

\* At the floor: s comes for o in one compare-and-set; both are needed until the outcome is known.
Swap(l, o, s) ==
  /\ up[l] /\ leading[l].on /\ ~leading[l].waiting /\ metadata.version < MaxVersion
  /\ s \notin leading[l].isr /\ o \in leading[l].isr /\ o # l /\ CaughtUp(l, s)
  /\ requests' = requests \cup {Request(l, (leading[l].isr \ {o}) \cup {s}, s)}
  /\ leading' = [leading EXCEPT ![l].waiting = TRUE, ![l].maximal = @ \cup {s}]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, promise, up, match, seen, acked,
                 next_value, crashes, lossy>>

\* The leader asks for the election of member n, with or without itself in the ISR, when
\* everything it has is committed. That spares clients a doubt and is no rule of safety: a
\* member has what was committed. All members are needed until the outcome is known.
HandOver(l, n, keep) ==
  /\ AllowHandOver
  /\ up[l] /\ leading[l].on /\ ~leading[l].waiting /\ metadata.version < MaxVersion
  /\ leading[l].epoch < MaxEpoch
  /\ n # l /\ n \in leading[l].isr \ metadata.stale /\ seen[l][n] # 0
  /\ leading[l].committed = Len(log[l])
  /\ LET rest == leading[l].isr \ {l}
         isr == IF keep \/ ~FloorKept(rest) THEN leading[l].isr ELSE rest
     IN requests' = requests \cup {[Request(l, isr, None) EXCEPT !.heir = n, !.registration = seen[l][n]]}
  /\ leading' = [leading EXCEPT ![l].waiting = TRUE]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, promise, up, match, seen, acked,
                 next_value, crashes, lossy>>

\* etcd compares the version, and the registration of who joins or is to lead, at any later time.
\* (It may be down already. Then what it lost stays lost, and its restart has to say so.)
EtcdApply(c) ==
  /\ c.status = "sent"
  /\ LET named == IF c.heir = None THEN c.added ELSE c.heir IN
     IF c.version = metadata.version /\ (named = None \/ MutAnyRegistration \/ registration[named] = c.registration)
     THEN /\ metadata' = [metadata EXCEPT !.isr = c.isr, !.stale = (@ \ {c.added}) \cap c.isr, !.version = @ + 1,
                                          !.leader = IF c.heir = None THEN @ ELSE c.heir,
                                          !.epoch = IF c.heir = None THEN @ ELSE c.epoch + 1]
          /\ requests' = (requests \ {c}) \cup {[c EXCEPT !.status = "ok"]}
          /\ lossy' = IF c.added # None /\ up[c.added] THEN lossy \ {c.added} ELSE lossy
     ELSE /\ requests' = (requests \ {c}) \cup {[c EXCEPT !.status = "refused"]}
          /\ UNCHANGED <<metadata, lossy>>
  /\ UNCHANGED <<registration, log, durable, synced, promise, up, leading, match, seen, acked,
                 next_value, crashes>>

\* The outcome reaches the life that asked; any other has gone. Refused means that the
\* record changed: the leader gives up, or stays and reads the record again (Refresh).
Reply(c, stay) ==
  /\ c.status \in {"ok", "refused"}
  /\ requests' = requests \ {c}
  /\ LET l == c.leader
         asked == /\ leading[l].on /\ leading[l].epoch = c.epoch
                  /\ leading[l].waiting /\ leading[l].version = c.version
     IN leading' =
          IF ~asked THEN leading
          ELSE IF c.status = "ok" /\ c.heir # None
          THEN [leading EXCEPT ![l] = NotLeading]
          ELSE IF c.status = "ok"
          THEN [leading EXCEPT ![l].isr = c.isr, ![l].maximal = c.isr, ![l].version = c.version + 1,
                               ![l].waiting = FALSE]
          ELSE IF stay
          THEN [leading EXCEPT ![l].maximal = leading[l].isr, ![l].waiting = FALSE]
          ELSE [leading EXCEPT ![l] = NotLeading]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, promise, up, match, seen, acked,
                 next_value, crashes, lossy>>

\* The outcome stays unknown: the leader writes the record again as it is, comparing the
\* version it read. From then on the request can only be refused, and what was read counts.
FenceRequest(l) ==
  /\ AllowUnknown /\ up[l] /\ leading[l].on /\ leading[l].waiting
  /\ metadata.leader = l /\ metadata.epoch = leading[l].epoch /\ metadata.version < MaxVersion
  /\ metadata' = IF MutNoFence THEN metadata ELSE [metadata EXCEPT !.version = @ + 1]
  /\ leading' = [leading EXCEPT ![l].isr = metadata.isr, ![l].maximal = metadata.isr,
                                ![l].version = metadata'.version, ![l].waiting = FALSE]
  /\ UNCHANGED <<registration, log, durable, synced, promise, up, match, seen, requests, acked,
                 next_value, crashes, lossy>>

(***************************** faults *************************************)

\* What is promised needs this: fewer than MinIsr replicas have lost something at a time.
MayLose(r) == Cardinality(lossy \cup {r}) < MinIsr

\* Power cut of a running node: k entries are left, at least the durable ones. With
\* sync=always it had acknowledged none of the others.
Crash(r, k) ==
  /\ up[r] /\ crashes < MaxCrash /\ k \in durable[r]..Len(log[r])
  /\ LET loses == k < Len(log[r]) /\ ~FsyncAck
     IN (loses => MayLose(r)) /\ lossy' = IF loses THEN lossy \cup {r} ELSE lossy
  /\ up' = [up EXCEPT ![r] = FALSE] /\ crashes' = crashes + 1
  /\ log' = [log EXCEPT ![r] = SubSeq(@, 1, k)] /\ durable' = [durable EXCEPT ![r] = k]
  /\ leading' = [leading EXCEPT ![r] = NotLeading]
  /\ UNCHANGED <<metadata, registration, synced, promise, match, seen, requests, acked, next_value>>

\* kill -9: the process is gone, the page cache is not.
Kill(r) ==
  /\ AllowKill /\ up[r] /\ crashes < MaxCrash
  /\ up' = [up EXCEPT ![r] = FALSE] /\ crashes' = crashes + 1
  /\ leading' = [leading EXCEPT ![r] = NotLeading]
  /\ UNCHANGED <<metadata, registration, log, durable, synced, promise, match, seen, requests, acked,
                 next_value, lossy>>

\* The machine of a node that is down loses power: what was not synced goes too.
Power(r) ==
  /\ AllowKill /\ ~up[r] /\ durable[r] < Len(log[r])
  /\ (~FsyncAck => MayLose(r)) /\ lossy' = IF FsyncAck THEN lossy ELSE lossy \cup {r}
  /\ log' = [log EXCEPT ![r] = SubSeq(@, 1, durable[r])]
  /\ UNCHANGED <<metadata, registration, durable, synced, promise, up, leading, match, seen, requests, acked,
                 next_value, crashes>>

\* The node will come back under its name with an empty disk: no log, no promises.
Wipe(r) ==
  /\ AllowWipe /\ up[r] /\ crashes < MaxCrash /\ MayLose(r)
  /\ up' = [up EXCEPT ![r] = FALSE] /\ crashes' = crashes + 1 /\ lossy' = lossy \cup {r}
  /\ log' = [log EXCEPT ![r] = <<>>] /\ durable' = [durable EXCEPT ![r] = 0] /\ promise' = [promise EXCEPT ![r] = 0]
  /\ leading' = [leading EXCEPT ![r] = NotLeading]
  /\ UNCHANGED <<metadata, registration, synced, match, seen, requests, acked, next_value>>

\* Only as a mutant: the leader pushed a batch while its own write was under way, that
\* write failed, and the log id is given to another batch of the same epoch.
FailedWrite(l) ==
  /\ AllowFailedWrite /\ MutReuseLogId /\ leading[l].on /\ up[l]
  /\ Len(log[l]) > leading[l].committed /\ Len(log[l]) > leading[l].epoch_start /\ durable[l] < Len(log[l])
  /\ log' = [log EXCEPT ![l] = SubSeq(@, 1, Len(@) - 1)]
  /\ UNCHANGED <<metadata, registration, durable, synced, promise, up, leading, match, seen, requests, acked,
                 next_value, crashes, lossy>>

\* Recovery fdatasyncs what it found before it reports it, and the node registers anew. A log
\* that recovery can not vouch for gets a new log_uid: the ISR then names one that nobody has
\* (`stale`), and the promise, which may be lost too, is replaced by the record's epoch.
Restart(r, renew) ==
  /\ ~up[r]
  /\ (renew => AllowRenew \/ (r \in lossy /\ ~MutLossyElectable))
  /\ (r \in lossy => renew \/ MutLossyElectable)
  /\ up' = [up EXCEPT ![r] = TRUE] /\ registration' = [registration EXCEPT ![r] = @ + 1]
  /\ metadata' = IF renew /\ r \in metadata.isr THEN [metadata EXCEPT !.stale = @ \cup {r}] ELSE metadata
  /\ promise' = [promise EXCEPT ![r] = IF renew /\ @ < metadata.epoch THEN metadata.epoch ELSE @]
  /\ durable' = [durable EXCEPT ![r] = IF MutNoRecoverySync THEN @ ELSE Len(log[r])]
  /\ synced' = [synced EXCEPT ![r] = Len(log[r])]
  /\ UNCHANGED <<log, leading, match, seen, requests, acked, next_value, crashes, lossy>>

Next ==
  \/ \E r \in Replicas : \/ Write(r) \/ Sync(r) \/ Commit(r) \/ Become(r) \/ Hear(r) \/ Refresh(r)
                         \/ FenceIsr(r) \/ FenceRequest(r) \/ Kill(r) \/ Power(r) \/ Wipe(r) \/ FailedWrite(r)
  \/ \E n \in Replicas, keep \in BOOLEAN : Elect(n, keep)
  \/ \E l, n \in Replicas, keep \in BOOLEAN : HandOver(l, n, keep)
  \/ \E l, f \in Replicas : Push(l, f) \/ Shrink(l, f) \/ Expand(l, f)
  \/ \E l, o, s \in Replicas : Swap(l, o, s)
  \/ \E c \in requests : EtcdApply(c) \/ \E stay \in BOOLEAN : Reply(c, stay)
  \/ \E r \in Replicas, renew \in BOOLEAN : Restart(r, renew)
  \/ \E r \in Replicas, k \in 0..MaxValue : Crash(r, k)

(*************************** invariants ***********************************)

Has(r, a) == Len(log[r]) >= a[1] /\ log[r][a[1]] = a[2]

\* Whoever may be elected now has everything that was ever acknowledged.
NoLoss == \A r \in {x \in metadata.isr \ metadata.stale : up[x]} : \A a \in acked : Has(r, a)

\* So has the leader that the record names.
LeaderComplete ==
  \A l \in Replicas : (leading[l].on /\ metadata.leader = l /\ leading[l].epoch = metadata.epoch)
                      => \A a \in acked : Has(l, a)

\* A log id is acknowledged with one content, for ever.
NoFork == \A a, b \in acked : a[1] = b[1] => a = b

\* No two leaders in one epoch.
OnePerEpoch == \A a, b \in Replicas : (a # b /\ leading[a].on /\ leading[b].on) => leading[a].epoch # leading[b].epoch

\* MinIsr copies of everything acknowledged, those that a fault took away included.
EnoughCopies == \A a \in acked : Cardinality({r \in Replicas : Has(r, a)} \cup lossy) >= MinIsr

\* The set that leaders come from never gets smaller than the floor.
IsrFloor == Cardinality(metadata.isr) >= MinIsr

\* Replicas are interchangeable.
Symmetry == Permutations(Replicas)
=============================================================================
