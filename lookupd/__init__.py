"""The lookup daemon: which nsqd has which topic.

`registry` remembers, `lookup_v1` speaks with nsqd, `http_api` answers clients and nsqadmin, `daemon` is all together.
"""
