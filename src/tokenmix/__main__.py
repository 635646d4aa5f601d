"""Entry point of `python -m tokenmix`."""

import contextlib
import os
import sys

from tokenmix.lab.cli import main

with contextlib.suppress(FileNotFoundError):  # the folder may be gone
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        # `python -m` searches the current folder first, where a file could replace any library imported later.
        del sys.path[0]

sys.exit(main())
