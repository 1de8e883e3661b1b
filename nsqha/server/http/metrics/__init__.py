"""What monitors read: all figures of a node as text for Prometheus, made while clients are served.

Downwards:

    scrapes     who gets /metrics, and when
    families    the families of metrics
    turns       work on the loop in turns
    exposition  the text of series that come in thousands
    series      the bound of all series: what is merged, and into what
"""
