"""Who calls, what they may do, and what was done: for all surfaces of a daemon (`nsqha.access` decides).

Downwards:

    guard        one caller, one need: yes, 401 or 403
    access_file  the file of tokens, read again when it changes
    audit_topic  the audit as messages of a topic
    exposure     what everybody may use without an access file, said once
    audit        one event for each change, done or refused
"""
