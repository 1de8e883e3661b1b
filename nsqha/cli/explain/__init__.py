"""`nsqha explain`: what names in logs and answers mean, and what to do.

Downwards:

    command       the verb
    explanations  the table of log events and codes
"""
