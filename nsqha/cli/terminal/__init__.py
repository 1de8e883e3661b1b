"""What people type and see: arguments, tables, times, exit statuses.

Downwards:

    parser  what all verbs share: help, near misses, where the broker is
    screen  tables, numbers, progress, questions
    times   times and places of a log as people write them
    exits   exit statuses, and one line on stderr that says why
"""
