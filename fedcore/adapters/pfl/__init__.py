"""fedcore in pfl-research: ``ClientStoreUserState`` keeps users' states, ``Method`` is a cohort's sum."""

from fedcore.adapters.pfl.method import Method
from fedcore.adapters.pfl.user_state import ClientStoreUserState

__all__ = ["ClientStoreUserState", "Method"]
