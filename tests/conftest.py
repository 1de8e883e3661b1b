"""Lets tests import what they share as `tests.sim...` whichever way pytest is started."""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# Tests that use gRPC start processes: gRPC's fork handlers would start its threads in the child, before it executes.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
