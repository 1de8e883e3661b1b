"""Lets tests import what they share as `tests.sim...` whichever way pytest is started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
