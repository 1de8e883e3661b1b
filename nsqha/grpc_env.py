"""What gRPC has to find in the environment before it is imported; a value that is there already stays.

GRPC_VERBOSITY: it writes every goaway to stderr otherwise.

GRPC_EXPERIMENTS: with the `event_engine` experiments of grpcio 1.85 a message crosses two threads more on its way
to the loop. Off, one costs a third to a half less CPU on each side, and its round trip is shorter (docs/performance.md
has the figures). Another version may not know these names: it says so in its own log and goes on.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
