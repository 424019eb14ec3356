"""`python -m optckpt`: the command line."""

from optckpt.cli import main

main()
