"""The lake: Parquet files of the log's messages, and manifests that say which of them count.

Downwards:

    verify    proves that the lake is the log; `contents` reads one file whole for it
    backfill  the same for a range of time, once
    archive   carries everything committed into the lake; a reader channel waits for it
    history   reads lake and log as one
    contents  reads one file whole
    rounds    plan, write, commit, until what is wanted is in the lake
    compact   merges small files into large ones
    plan      which ranges are not in the lake yet, cut into what tasks write
    task      what a task does: fetch, verify, write files
    iceberg   commits to an Iceberg table
    commit    commits to manifests
    parquet   how a file is made and read
    manifest  what a manifest says, and what all of them say together
    store     files at a URI: whole and durable, or not there
    agree     one content for one name, in stores that cannot create exclusively
    names     how files are called
"""
