"""`nsqha check`: whether a node, the cluster or a channel is well, for HEALTHCHECK, Nagios and people.

Downwards:

    command   the verbs, how they ask, and what it means when nobody answers
    judging   what is a warning and what is critical: pure
    verdict   a severity with its reasons, and the formats it is shown in
"""
