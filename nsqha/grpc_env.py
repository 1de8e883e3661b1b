"""What gRPC has to find in the environment before it is imported; a value that is there already stays.

GRPC_VERBOSITY: it writes every goaway to stderr otherwise.

GRPC_EXPERIMENTS is left alone. Without the `event_engine` experiments of grpcio 1.85 a bare stream costs a third less
CPU, a broker as much as with them. And connections are then made only while some thread polls: a lookup daemon, which
asks etcd by short synchronous calls, did not find back to one that was restarted, because what polls in between does so
every 5 s by default and an attempt lasts 1 s (GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS=100 mends that).
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
