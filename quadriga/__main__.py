"""`python -m quadriga` is the command `quadriga`."""

from quadriga.cli import main

main()
