"""The durable half of a partition: segments of wire frames, their commitlog, recovery, and the node journal.

Synchronous and without threads; the shell decides what runs where. Reading order: `entry`, `pairs`, `log`, `lookup`,
`recovery`. Formats are drawn in docs/disk-format.md.
"""
