"""The stream source.

Downwards:

    stream     the stream source behind `readStream`
    witnesses  checks that the log is the one that a checkpoint was made with
    offsets    what a stream has read, as stored in the checkpoint
"""
