"""On what a number was measured; a leaf of the package, so that run folders can hold it as well."""

from tokenmix.environment import cpu_name, environment

__all__ = ["cpu_name", "environment"]
