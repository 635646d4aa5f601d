"""`python -m tokenmix` is the `tokenmix` command."""

import sys

from tokenmix.cli import main

sys.exit(main())
