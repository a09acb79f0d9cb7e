"""A GPU by pretence: torch's tensors on it lie in host memory, and every operation that mixes it with the CPU fails.

What asks torch for ``cuda:0`` gets a tensor of the CPU's that is remembered, by its memory, to be a GPU's, and says so
of itself. So the arithmetic is real, and what is made on the wrong device, or read without being brought back, is found
as a GPU would find it, inside functions that torch transforms (``vmap``, ``grad``) too.
"""

import torch
from torch._C import _functorch as functorch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name

GPU = torch.device("cuda", 0)
READS = ("numpy", "__array__", "tolist", "__dlpack__")
MIXES = ("__set__", "_has_compatible_shallow_copy_type")  # what puts a tensor in the place of another


class MixedDevicesError(RuntimeError):
    pass


class Pretended(TorchFunctionMode):
    """The mode; ``made`` counts what was made or brought there."""

    def __init__(self):
        super().__init__()
        self._there, self.made = {}, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        with torch._C.DisableTorchFunction():
            if name == "__get__" and self._getter(function) == "device":
                return GPU if self.is_there(args[0]) else function(*args)
            if name in ("to", "cuda", "cpu") and args and isinstance(args[0], torch.Tensor):
                return self._move(name, args, kwargs)
            tensors = list(_tensors((args, kwargs)))
            places = {self.is_there(tensor) for tensor in tensors if tensor.dim() or self.is_there(tensor)}
            if name in READS and True in places:
                raise MixedDevicesError(f"{name} of a tensor on the GPU")
            due = kwargs.get("device")
            if due is not None and torch.device(due).type == "cuda":
                kwargs["device"] = "cpu"
                places = {True}
            elif due is not None and not tensors:
                places = {False}
            if len(places) > 1 and name not in MIXES:
                raise MixedDevicesError(f"{resolve_name(function) or name}: tensors on the GPU and on the CPU")
        made = function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if True in places:
                for tensor in _tensors(made):
                    self._remember(tensor)
        return made

    def is_there(self, tensor):
        key = self._key(tensor)
        if key is None or key not in self._there:
            return False
        if self._there[key].expired():
            del self._there[key]
            return False
        return True

    def _move(self, name, args, kwargs):
        tensor, *rest = args
        asked = [one for one in (*rest, *kwargs.values()) if isinstance(one, str | torch.device)]
        if name == "cpu" or (asked and torch.device(asked[0]).type == "cpu"):
            return tensor.clone() if self.is_there(tensor) else tensor
        if asked and torch.device(asked[0]).type == "cuda":
            if self.is_there(tensor):
                return tensor
            moved = tensor.detach().clone()
            self._remember(moved)
            return torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved
        return tensor.to(*rest, **kwargs)

    def _remember(self, tensor):
        key = self._key(tensor)
        if key is not None and not self.is_there(tensor):
            self._there[key] = StorageWeakRef(self._plain(tensor).untyped_storage())
            self.made += 1

    @staticmethod
    def _key(tensor):
        plain = Pretended._plain(tensor)
        return None if plain.device.type == "meta" else plain.untyped_storage()._cdata

    @staticmethod
    def _plain(tensor):
        """The tensor below those that stand for it inside torch's transformations of functions."""
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
