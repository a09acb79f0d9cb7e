"""Adds the names of this package when it is imported."""

from fedcore import algorithms
from fedcore.sim import data, nets, participation
from mine.data import clouds
from mine.methods import Accelerated
from mine.models import line
from mine.patterns import OddAndEven

algorithms.REGISTRY["Accelerated"] = Accelerated
participation.REGISTRY["OddAndEven"] = OddAndEven
data.REGISTRY["clouds"] = clouds
nets.REGISTRY["line"] = line
