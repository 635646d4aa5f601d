"""The data sets of our own recipes, as plug-ins: importing this package registers them, and nothing heavy.

`tokenmix` imports it when it runs from a checkout; the wheel does not contain it. Each domain has a folder, whose
`__init__` registers its sets by name and whose modules read them.
"""

from recipes.datasets import images, points, text

__all__ = ["images", "points", "text"]
