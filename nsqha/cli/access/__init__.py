"""`nsqha access`: tokens for the file of --access-file.

Downwards:

    command  make a token, check a file
"""
