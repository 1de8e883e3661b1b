"""`nsqha message` and `nsqha dead`: single messages of a channel.

Downwards:

    dead      the same for dead letters: list, requeue, purge
    command   list, show, finish, requeue, defer, kill
    paging    asks for a page of each partition until there are enough, and changes a selection page by page
    shown     what a message looks like in a table
"""
