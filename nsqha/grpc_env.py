"""Environment variables that gRPC reads when it is imported; a value that is set already stays.

GRPC_VERBOSITY: without it gRPC writes every goaway to stderr.

GRPC_EXPERIMENTS is not changed. Without the `event_engine` experiments of grpcio 1.85 a bare stream costs a third less
CPU, but a broker costs the same. And connections are then made only while some thread polls: a lookup daemon, which
asks etcd by short synchronous calls, did not reconnect to a restarted etcd, because gRPC polls only every 5 s in
between and an attempt lasts 1 s (GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS=100 repairs that).
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
