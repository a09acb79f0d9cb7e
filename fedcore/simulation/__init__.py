"""The simulator: participation, data, local rules, local work and engines. This module needs NumPy only."""
