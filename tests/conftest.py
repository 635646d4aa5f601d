"""What holds for every test."""

import os

from hypothesis import settings

# The same examples in every run, so that a failure can be had again and a green run says something about the change;
# HYPOTHESIS_PROFILE=search looks for new ones (make test-all does).
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
