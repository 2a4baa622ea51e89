"""`python -m qkit` is `qkit`."""

from qkit.cli import main

main()
