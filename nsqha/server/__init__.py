"""The shell: sockets, the event loop, worker threads. It turns facts into calls of the cores and does what they say."""
