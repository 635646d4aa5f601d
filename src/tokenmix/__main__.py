"""`python -m tokenmix` is the `tokenmix` command."""

import os
import sys

from tokenmix.lab.cli import main

if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    # `python -m` searches the current folder first, where a file could replace any library that is imported later.
    del sys.path[0]

sys.exit(main())
