"""The `tokenmix` command: verbs only; each is a few lines over the library.

Heavy modules are imported inside the verbs, so that `tokenmix --help` answers at once.
"""

from tokenmix.cli.command import VERBS, main, parse

__all__ = ["VERBS", "main", "parse"]
