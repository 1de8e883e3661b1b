"""nsqha: a replicated, durable message broker that unchanged NSQ V2 clients use as if it were nsqd.

The layers and their one direction of imports are in ARCHITECTURE.md; `tests/tidy/test_layers.py` checks them.
"""

__version__ = "0.1.0"

NSQ_VERSION = "1.3.0"
"""The nsqd release whose behaviour is reproduced; what IDENTIFY, /info and /nodes report, since clients parse it."""
