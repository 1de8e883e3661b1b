"""What is on this node's disk becomes open logs with their channel states, and these become partitions that are led.

Downwards:

    opener        logs created and recovered; partitions made of them
    sync_history  under which sync settings the logs have acknowledged
    log_folders   where logs lie, and how their files go
    state_loader  the channel state that a log says
    page_cache    which page cache this process writes into
"""
