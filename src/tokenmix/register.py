"""Importing this module registers our models with timm, and with transformers if installed.

For programs that import a module by name: timm's `train.py --device-modules tokenmix.register`.
"""

from importlib.util import find_spec

import tokenmix.models

if find_spec("transformers"):
    import tokenmix.swap.opening
    import tokenmix.text  # noqa: F401
