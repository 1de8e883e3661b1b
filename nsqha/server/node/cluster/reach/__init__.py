"""The connections that a node needs before it gets replicas that it never held.

Downwards:

    reach     tries them when this node joins, and says in its record which ones are missing
    dialler   connects to the ports of a node, also for one that joins and asks for it
"""
