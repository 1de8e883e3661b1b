"""What gRPC has to find in the environment before it is imported; a value that is there already stays.

GRPC_VERBOSITY: it writes every goaway to stderr otherwise.

GRPC_EXPERIMENTS is left alone. Without the `event_engine` experiments of grpcio 1.85 a message between nodes costs up
to a third less CPU, but connections are then made only while some thread polls: after a restart of etcd, a lookup
daemon, which asks it by short synchronous calls, did not find back to it for a minute and more.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
