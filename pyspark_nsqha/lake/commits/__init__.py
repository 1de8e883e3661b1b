"""What says which files of a lake count: manifests, or the snapshots of an Iceberg table.

Downwards:

    iceberg   commits to an Iceberg table
    commit    commits to manifests
    manifest  the contents of one manifest, and of all together
"""
