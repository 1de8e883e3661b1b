"""`nsqha spark`: jobs that read the log in parallel. pyspark is imported when a verb runs.

Downwards:

    command  the command line
    lake     archive, backfill, verify, compact
    replay   messages of the log once more, or a channel back
    lag      how far readers and a lake are behind
    checks   what is looked at before Spark starts
    flags    what the verbs share
"""
