"""Samples: text and data sets that ship with packages, cut into steps and microbatches.

`prepare` makes `Samples` of what a job asks for; `StepOrder` says which of them each step takes.
"""

from share_compute.data.order import StepOrder
from share_compute.data.preparation import Counts, Prepared, prepare
from share_compute.data.samples import DigitSamples, Samples, Split, TextSamples

__all__ = ["Counts", "DigitSamples", "Prepared", "Samples", "Split", "StepOrder", "TextSamples", "prepare"]
