"""The simulator: participation, data, local rules, and engines that train clients. This module needs only NumPy."""
