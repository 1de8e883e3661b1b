"""`nsqha spark`: jobs that read the log in parallel. pyspark is imported when a verb runs.

Downwards:

    command  the command line
    lake     archive, backfill, verify, compact
    replay   sends messages of the log again, or moves a channel back
    lag      how far readers and a lake are behind
    checks   checks before Spark starts
    flags    flags that the verbs share
"""
