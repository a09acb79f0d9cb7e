import pytest
from fedcore.testing.executors import ExecutorContract
class TestProcesses(ExecutorContract):
    pass
class TestRay(ExecutorContract):
    @pytest.fixture(autouse=True)
    def session(self, ray_session):
        self.session=ray_session
    def make_executor(self):
        return self.session
