"""What a node does for its clients where another node leads: publishes go there, messages come from there.

Downwards:

    relay_client    consumers of this node that read partitions led elsewhere
    relayed_clients who is behind a relayed consumer, for the leader's statistics
    relay_server    clients of other nodes as consumers of a channel here
    rdy_credit      one RDY window shared among partitions that different nodes lead
    forward_server  forwarded publishes go into the partition that is led here
    forward_client  publishes of this node on their way to the leader
    channel_sync    every leader follows a changed channel list before it is answered
    hints           who leads, as other nodes say, while etcd is away
    leaders         who leads what, as the parts that serve clients see it
    publisher       what one connection publishes to one partition, in order
    audit_copies    changes of the audit topic, in the audit of every node
"""
