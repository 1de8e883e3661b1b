"""`nsqha import`: takes over what another broker has on disk.

Downwards:

    command      the command line: the plan, the question, the result
    takeover     creates topics and channels at a broker and publishes messages, and goes on after a kill
    layout       the order in which messages are published, so that channels get what they had
    nsqd_folder  the files of nsqd: nsqd.dat and disk queues
    http_target  the broker that takes the messages, by nsqd's HTTP API
"""
