"""What every token mixer must do, as functions that run on any nn.Module: for our layers and for anyone else's."""

from tokenmix.testing.harness import Advice, Build, Builder, NotApplicable, PropertyFailure
from tokenmix.testing.properties import PROPERTIES, Property

__all__ = ["PROPERTIES", "Advice", "Build", "Builder", "NotApplicable", "Property", "PropertyFailure"]
