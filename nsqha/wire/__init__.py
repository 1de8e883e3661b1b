"""The NSQ V2 protocol as calls: bytes in, calls of a handler out; no socket, clock or loop."""
