"""The engine on Ray: clients are trained by actors, here or on other machines.

Ray itself is imported in ``fedcore.ray_session`` alone, and when a session begins.
"""

from fedcore.engines.ray.engine import Ray
from fedcore.ray_session import Session

__all__ = ["Ray", "Session"]
