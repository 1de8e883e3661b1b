"""A cache of the committed state on the node's disk. Nothing in it is needed: the logs say it all.

Downwards:

    lmdb_cache      the cache of committed state: deferred sets over `lmdb_tables`, proven by `lmdb_proof`
    lmdb_partition  one partition in the cache
    lmdb_tables     the database, and the only user of lmdb
    lmdb_proof      whether the database is what was last written
"""
