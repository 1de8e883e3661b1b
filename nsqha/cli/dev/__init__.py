"""`nsqha dev`: a broker, or a whole cluster, on this machine.

Downwards:

    cluster   an etcd, a lookup daemon and brokers, each a process
    plan      folders, ports and command lines of a cluster
    children  processes that live and die with this one
    node      a broker and a lookup daemon in one process
    command   the command line, and what the others share
"""
