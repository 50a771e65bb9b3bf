"""Property tests have no deadline for each example, since a busy machine would exceed it."""

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")
