"""Property checks of token mixers, usable on any nn.Module."""

from tokenmix.testing.harness import Advice, Build, Builder, NotApplicable, PropertyFailure
from tokenmix.testing.properties import PROPERTIES, Property

__all__ = ["PROPERTIES", "Advice", "Build", "Builder", "NotApplicable", "Property", "PropertyFailure"]
