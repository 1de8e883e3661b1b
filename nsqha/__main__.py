"""`python -m nsqha` is the `nsqha` command."""

from nsqha.cli import main

main()
