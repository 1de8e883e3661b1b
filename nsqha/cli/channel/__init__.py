"""`nsqha channel`: what channels there are, and what an operator does to them.

Downwards:

    command   list, show, create, delete, pause, unpause, empty
    policies  set, and what `show` says of policies
"""
