"""What is seen of a cluster by those who change nothing: the records, and what the nodes themselves say.

Downwards:

    page     all of it, as one text
    answers  what nodes say of their replicas
"""
