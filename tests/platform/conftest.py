"""Property tests have no deadline for each example: a busy machine is no defect."""

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")
