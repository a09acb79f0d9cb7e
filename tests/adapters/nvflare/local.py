"""A Controller whose clients are functions: what goes down and up passes through NVFlare's own messages and bytes."""

from types import SimpleNamespace

from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from fedcore.adapters.nvflare import Controller

common_decomposers.register()


def wired(model):
    """The model as it comes out at the other end."""
    return FLModelUtils.from_shareable(fobs.loads(fobs.dumps(FLModelUtils.to_shareable(model))))


class LocalController(Controller):
    """NVFlare's transport replaced by calls: ``clients`` maps a name to a function from FLModel to FLModel or None."""

    def __init__(self, clients, x0, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.clients, self.x0, self.saved, self.warnings = clients, x0, [], []
        self.engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=name) for name in self.clients])
        self.abort_signal, self._task_check_period = Signal(), 0.001

    def load_model(self):
        return FLModel(params={name: array.copy() for name, array in self.x0.items()})

    def save_model(self, model):
        self.saved.append(model)

    def send_model(self, task_name, data, targets, timeout, callback):
        for name in targets:
            answer = self.clients[name](wired(data))
            if answer is not None:
                answer = wired(answer)
                answer.meta["client_name"] = name
                callback(answer)

    def get_num_standing_tasks(self):
        return 0

    def info(self, message):
        pass

    def warning(self, message):
        self.warnings.append(message)

    error = warning
