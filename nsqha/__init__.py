"""nsqha: a replicated, durable message broker that unchanged NSQ V2 clients use as if it were nsqd.

The layers and their one direction of imports are in ARCHITECTURE.md; `tests/tidy/test_layers.py` checks them.

Downwards:

    cli          the `nsqha` command
    admin        administration over gRPC
    server       the broker's shell: sockets, the event loop, worker threads
    replication  which replica has acknowledged what, and what is committed: decisions without I/O
    election     the metadata: which topics exist, which node leads each partition, where that is stored
    cursor       channels as cursors over the log
    commitlog    segments, commitlog, recovery, the node journal
    wire         the NSQ V2 protocol
    access       who may do what: roles, tables of all surfaces, tokens
    options      every flag of nsqd and nsqlookupd
    goflags      flags, config file and environment as Go programs read them
    texts        JSON and TOML that others wrote, bounded and read as their programs read it
    nsqlog       log lines
    log_writer   standard error, which nothing waits for
    quantile     percentiles and histograms
    frames       numbers of control frames and flags of batches
    ranges       sets of integers as ranges
    ids          names and numbers of the whole system
    clock        clocks, passed in
    grpc_channels  gRPC's channels, made in one place
    cluster_secret  proofs that a process knows its cluster's secret
    private_file  files with secrets: read whole, and refused where every user of the host may read them
    grpc_env     environment variables for gRPC
    errors       every exception
    hot          the code that runs for every message, compiled or not
"""

__version__ = "0.1.0"

NSQ_VERSION = "1.3.0"
"""The nsqd release whose behaviour is reproduced; what IDENTIFY, /info and /nodes report, since clients parse it."""
