"""Training data: samples made from text files, or from the digits data set of scikit-learn, and their order.

`prepare` makes the `Samples` of a job. `StepOrder` selects the samples of each step.
"""

from share_compute.data.order import StepOrder
from share_compute.data.preparation import Counts, PreparedData, prepare
from share_compute.data.samples import DigitSamples, Samples, Split, TextSamples

__all__ = [
    "Counts",
    "DigitSamples",
    "PreparedData",
    "Samples",
    "Split",
    "StepOrder",
    "TextSamples",
    "prepare",
]
