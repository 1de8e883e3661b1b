"""What is on this node's disk becomes open logs with their channel states, and these become partitions that are led.

Downwards:

    opener  logs created, recovered and removed; partitions made of them
"""
