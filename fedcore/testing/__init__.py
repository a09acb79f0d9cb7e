"""Contracts: tests of your own algorithm, rule, store, server, adapter or executor.

Derive a test class, and override one to three methods; pytest then runs the tests of the contract::

    class TestMine(AlgorithmContract):
        def make_algorithm(self):
            return Mine()
"""

from fedcore.testing.adapters import AdapterContract
from fedcore.testing.algorithms import AlgorithmContract, RuleContract, check_algorithm, check_optimizer
from fedcore.testing.contract import Contract, check
from fedcore.testing.executors import ExecutorContract
from fedcore.testing.servers import ServerContract
from fedcore.testing.stores import StoreContract

__all__ = ["AdapterContract", "AlgorithmContract", "Contract", "ExecutorContract", "RuleContract", "ServerContract"]
__all__ += ["StoreContract", "check", "check_algorithm", "check_optimizer"]
