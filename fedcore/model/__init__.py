"""A model's tensors as one vector, averages of models, and files of models."""

from fedcore.model.averaging import aggregate as aggregate
from fedcore.model.files import FORMS as FORMS
from fedcore.model.files import form_of as form_of
from fedcore.model.files import read_model as read_model
from fedcore.model.files import write_model as write_model
from fedcore.model.layout import Layout as Layout
from fedcore.model.layout import Model as Model
from fedcore.model.layout import Slice as Slice
from fedcore.model.safetensors import Safetensors as Safetensors
