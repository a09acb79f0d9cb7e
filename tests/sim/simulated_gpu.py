"""A simulated GPU: tensors on it are in host memory, and an operation that mixes it with the CPU fails.

Code that asks torch for ``cuda:0`` gets a CPU tensor whose memory is remembered as the GPU's, and whose ``device`` is
the GPU. The arithmetic is real. Tensors on a wrong device, and reads without a copy to the host, fail as on a GPU, also
inside functions that torch transforms (``vmap``, ``grad``).
"""

import torch
from torch._C import _functorch as functorch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name

GPU = torch.device("cuda", 0)
READS = ("numpy", "__array__", "tolist", "__dlpack__")
MIXES = ("__set__", "_has_compatible_shallow_copy_type")  # These replace a tensor by another.


class MixedDevicesError(RuntimeError):
    pass


class SimulatedGpu(TorchFunctionMode):
    """The mode; ``created`` counts the tensors that were created on the GPU or copied to it."""

    def __init__(self):
        super().__init__()
        self._on_gpu, self.created = {}, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        with torch._C.DisableTorchFunction():
            if name == "__get__" and self._getter(function) == "device":
                return GPU if self.is_on_gpu(args[0]) else function(*args)
            if name in ("to", "cuda", "cpu") and args and isinstance(args[0], torch.Tensor):
                return self._move(name, args, kwargs)
            tensors = list(_tensors((args, kwargs)))
            places = {self.is_on_gpu(tensor) for tensor in tensors if tensor.dim() or self.is_on_gpu(tensor)}
            if name in READS and True in places:
                raise MixedDevicesError(f"{name} of a tensor on the GPU")
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs["device"] = "cpu"
                places = {True}
            elif device is not None and not tensors:
                places = {False}
            if len(places) > 1 and name not in MIXES:
                raise MixedDevicesError(f"{resolve_name(function) or name}: tensors on the GPU and on the CPU")
        result = function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if True in places:
                for tensor in _tensors(result):
                    self._remember(tensor)
        return result

    def is_on_gpu(self, tensor):
        key = self._key(tensor)
        if key is None or key not in self._on_gpu:
            return False
        if self._on_gpu[key].expired():
            del self._on_gpu[key]
            return False
        return True

    def _move(self, name, args, kwargs):
        tensor, *rest = args
        targets = [one for one in (*rest, *kwargs.values()) if isinstance(one, str | torch.device)]
        if name == "cpu" or (targets and torch.device(targets[0]).type == "cpu"):
            return tensor.clone() if self.is_on_gpu(tensor) else tensor
        if targets and torch.device(targets[0]).type == "cuda":
            if self.is_on_gpu(tensor):
                return tensor
            moved = tensor.detach().clone()
            self._remember(moved)
            return torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved
        return tensor.to(*rest, **kwargs)

    def _remember(self, tensor):
        key = self._key(tensor)
        if key is not None and not self.is_on_gpu(tensor):
            self._on_gpu[key] = StorageWeakRef(self._plain(tensor).untyped_storage())
            self.created += 1

    @staticmethod
    def _key(tensor):
        plain = SimulatedGpu._plain(tensor)
        return None if plain.device.type == "meta" else plain.untyped_storage()._cdata

    @staticmethod
    def _plain(tensor):
        """The tensor inside the wrappers of torch's transformations of functions."""
        while functorch.is_functorch_wrapped_tensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        return tensor

    @staticmethod
    def _getter(function):
        return getattr(getattr(function, "__self__", None), "__name__", "")


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
