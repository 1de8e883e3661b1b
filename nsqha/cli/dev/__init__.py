"""`nsqha dev`: a broker, or a whole cluster, on this machine.

Downwards:

    command   the command line
    cluster   an etcd, a lookup daemon and brokers, each a process
    node      a broker and a lookup daemon in one process
    plan      folders, ports and command lines of a cluster, and defaults that a single node shares
    children  processes that live and die with this one
"""
