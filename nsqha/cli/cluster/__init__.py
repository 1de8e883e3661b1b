"""`nsqha cluster`: its verbs talk to etcd, and to nodes if need be.

Downwards:

    command        the command line
    accept         an etcd that was put back to an older state follows the nodes again
    change         move, decommission, balance, elect
    import_topics  a single node's topics become topics of a cluster
    show           what status, nodes and topics show
    access         how the verbs reach etcd and the nodes
"""
