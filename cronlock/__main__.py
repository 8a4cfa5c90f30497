"""`python -m cronlock` is `cronlock`."""

from cronlock.cli import main

main()
