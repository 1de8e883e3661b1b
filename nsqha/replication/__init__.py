"""Replication of one partition as decisions without I/O: who has acknowledged what, and what is committed."""
