"""The local training of one client in torch: SGD along its method's direction, devices and random numbers."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedcore.arrays import F32, I64, KNOWN, Vector
from fedcore.errors import ArrayError, DeviceError, DtypeError, RangeError, ShapeError, UnknownNameError
from fedcore.kernels import direction_step
from fedcore.model import Layout
from fedcore.runtime import generator
from fedcore.server.broadcast import Instructions
from fedcore.sim.checks import Checked, Real

CPU = torch.device("cpu")
_NAME = re.compile(r"cpu|cuda(:\d{1,4})?")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(one: object) -> bool:
    """Whether a module or a parameter has hooks."""
    return any(getattr(one, kind, None) for kind in (*_HOOKS, "_post_accumulate_grad_hooks"))


def copy_of(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module; raise a RangeError if it would compute something else than the module.

    A copy lacks the hooks of parameters, and a function that replaced a layer's ``forward`` still uses the old layer.
    """
    if hooked := [name for name, parameter in module.named_parameters() if has_hooks(parameter)]:
        raise RangeError(f"{hooked[0]}: copies of the module lack this parameter's hook; do its work in forward")
    copied, own = copy.deepcopy(module), [vars(part)["forward"] for part in module.modules() if "forward" in vars(part)]
    if shared := [name for name, part in copied.named_modules() if vars(part).get("forward") in own]:
        raise RangeError(f"{shared[0] or 'module'}: its forward is a function that copies share; use types.MethodType")
    return copied


class FlatModel:
    """A module whose parameters, float buffers and gradients are views of flat vectors.

    One copy loads the model, and one operation updates all its parameters. The parameters and float buffers of the
    module become views of ``flat``, and their gradients views of ``grad``, to which the backward pass adds.
    ``module.zero_grad()`` and ``module.to(...)`` would break these views; use ``grad.zero_()``.

    Args:
        module: on the CPU or already on the device; its tensors are float32 or integer.
        device: the model's device.

    Attributes:
        device: the model's device.
        flat: torch.float32[n], the parameters, then the float buffers.
        parameters, grad: torch.float32[n_parameters]; ``parameters`` is the first part of ``flat``.
        frozen: the ranges of the parameters without ``requires_grad``, which no step changes.
    """

    def __init__(self, module: nn.Module, device: torch.device = CPU) -> None:
        self.module = module
        self.layout = Layout.of(module)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        for name in self.layout.names:
            if tensors[name].dtype != torch.float32:
                raise DtypeError(f"{name}: must be float32 or an integer dtype, got {tensors[name].dtype}")
            if tensors[name].device not in (CPU, device):
                raise ArrayError(f"{name}: must be on the CPU, got {tensors[name].device}")
        if device.type != "cpu":
            module.to(device)
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self.flat = torch.empty(self.layout.n, device=device)
        self.device = self.flat.device
        self.parameters = self.flat[: self.layout.n_parameters]
        self.grad = torch.zeros(self.layout.n_parameters, device=device)
        for piece in self.layout.slices:
            tensor, view = tensors[piece.name], self.flat[piece.start : piece.stop].view(piece.shape)
            view.copy_(tensor.detach())
            tensor.data = view
            if piece.kind == "parameter":
                tensor.grad = self.grad[piece.start : piece.stop].view(piece.shape)
        ranges = {piece.name: slice(piece.start, piece.stop) for piece in self.layout.slices}
        self.frozen = [ranges[k] for k, one in module.named_parameters() if k in ranges and not one.requires_grad]
        self._others = {name: one.clone() for name, one in module.named_buffers() if name not in ranges}

    def load(self, x: F32, others: Mapping[str, Vector] | None = None) -> None:
        """Copy a flat vector, float32[n] in host memory, into the model.

        Its other buffers, such as integer counters and non-persistent ones, get their values in ``others``, by name, or
        those that they had when this object was made. So training does not depend on earlier training.
        """
        if x.dtype != np.float32:
            raise DtypeError(f"x: must be float32[{self.layout.n}], got {x.dtype}")
        if x.shape != (self.layout.n,):
            raise ShapeError(f"x: must be float32[{self.layout.n}], got shape {x.shape}")
        buffers = dict(self.module.named_buffers()) if self._others else {}
        for name, first in self._others.items():
            buffers[name].copy_(torch.as_tensor((others or {}).get(name, first)))
        if self.device.type == "cpu":
            np.copyto(self.flat.numpy(), x)
        else:
            self.flat.copy_(moved(x, self.device))


def carry(vector: F32 | None, old: Layout, new: Layout, out: F32 | None = None) -> F32 | None:
    """Copy a vector of one layout into ``out``, a vector of another; return None without a vector.

    The layouts may have their tensors in another order. Elements of tensors that one of the vectors lacks, such as a
    buffer that only one layout counts as a parameter, do not change.

    Args:
        vector: float32[old.n] or float32[old.n_parameters].
        out: float32[new.n] or float32[new.n_parameters]. Default: zeros, float32[new.n_parameters].
    """
    if vector is None:
        return None
    out = np.zeros(new.n_parameters, np.float32) if out is None else out
    places = {piece.name: piece for piece in old.slices if piece.stop <= len(vector)}
    for piece in new.slices:
        place = places.get(old.aliases.get(piece.name, piece.name))
        if place is not None and piece.stop <= len(out):
            out[piece.start : piece.stop] = vector[place.start : place.stop]
    return out


@dataclass(frozen=True)
class LocalOptions(Checked):
    """Changes to a client's plain steps.

    Attributes:
        weight_decay: part of the gradient, so corrections include it.
        momentum: m <- momentum m + d, y <- y - lr m with d the method's direction.
        clip: the maximum norm of a minibatch gradient without weight decay. Default: no limit.
    """

    weight_decay: Annotated[float, Real("[0, inf)")] = 0.0
    momentum: Annotated[float, Real("[0, 1)")] = 0.0
    clip: Annotated[float | None, Real("(0, inf)")] = None

    @property
    def plain(self) -> bool:
        """Whether the server can derive the mean gradient from y: yes with weight decay, not with momentum or clip."""
        return not self.momentum and self.clip is None


def rate_of(instructions: Instructions, step: int) -> float:
    """Return the rate of a step, counted from 0."""
    of_step = instructions.lr_of_step
    return instructions.lr if of_step is None else of_step(step)


def mean_rate(instructions: Instructions, steps: int) -> float:
    """Return the mean of the first ``steps`` rates; without steps the first rate."""
    of_step = instructions.lr_of_step
    return sum(map(of_step, range(steps))) / steps if of_step and steps else rate_of(instructions, 0)


@dataclass(frozen=True, eq=False)
class Vectors:
    """The vectors of a ``Descent``, float32[n] each, on the device of ``y``; offset and x may also be in host memory.

    Attributes:
        y: changed in place.
        grad: the buffer that holds the gradient at y before each step; on a GPU the step overwrites it.
        grad_prev: the buffer with the gradient at x_{t-1}, including weight decay.
        control: the buffer to which each step adds the gradient, including weight decay.
        velocity: m of the local momentum, changed in place.
    """

    y: Tensor
    grad: Tensor
    offset: Tensor | F32 | None = None
    x: Tensor | F32 | None = None
    grad_prev: Tensor | None = None
    control: Tensor | None = None
    velocity: Tensor | None = None


class Descent:
    """Steps y <- y - lr (a (grad + weight_decay y) + b grad_prev + offset + mu (y - x)), or along their momentum.

    The operations are elementwise, so the vectors, float32[n] each, may concatenate those of many clients. On a GPU,
    torch's operations compute the same formula with different rounding.

    Args:
        vectors: y and the others.
        numbers: a, b and mu.
        options: weight decay and momentum; the caller clips the gradient.

    Cost: on a CPU one pass of ``kernels.direction_step``, with ``control`` one more, with momentum four more; on a GPU
        two to eight operations, without waiting.
    """

    def __init__(self, vectors: Vectors, numbers: tuple[float, float, float], options: LocalOptions) -> None:
        def placed(vector: Tensor | F32 | None) -> Any:
            if on_cpu:
                return on_host(vector) if isinstance(vector, Tensor) else vector
            return moved(vector, device) if isinstance(vector, np.ndarray) else vector

        device = vectors.y.device
        on_cpu = device.type == "cpu"
        (self._a, self._b, self._mu), self._options = numbers, options
        self._y, self._grad, self._offset, self._x, *buffers = map(placed, vars(vectors).values())
        self._grad_prev, self._control, self._velocity = buffers
        self.step = self._step_on_cpu if on_cpu else self._step_on_gpu
        """Take a step with a given rate along the gradients in the buffers."""

    def _step_on_cpu(self, lr: float) -> None:
        y, decay = self._y, self._options.weight_decay
        if self._control is not None:
            self._control += self._grad
            if decay:
                self._control += np.float32(decay) * y
        before = None if self._velocity is None else y.copy()
        numbers = {"lr": lr if before is None else 1.0, "a": self._a, "b": self._b, "mu": self._mu}
        vectors = {"grad_prev": self._grad_prev, "offset": self._offset, "x": self._x}
        direction_step(y, self._grad, weight_decay=decay, **numbers, **vectors)
        if before is not None:
            self._velocity *= np.float32(self._options.momentum)
            self._velocity += before - y
            np.subtract(before, np.float32(lr) * self._velocity, out=y)

    def _step_on_gpu(self, lr: float) -> None:
        y, along = self._y, self._grad
        if self._options.weight_decay:
            along.add_(y, alpha=self._options.weight_decay)
        if self._control is not None:
            self._control.add_(along)
        if self._a != 1:
            along.mul_(self._a)
        if self._grad_prev is not None:
            along.add_(self._grad_prev, alpha=self._b)
        if self._offset is not None:
            along.add_(self._offset)
        if self._x is not None and self._mu:
            along.add_(y - self._x, alpha=self._mu)
        if self._velocity is not None:
            along = self._velocity.mul_(self._options.momentum).add_(along)
        y.add_(along, alpha=-lr)


@dataclass(frozen=True)
class Work:
    """The local work of a client: K_i steps, their mean rate eta_i, and the mean of its gradients (``control``).

    ``control`` is float32[n_parameters], and ``loss`` is ``mean_loss`` at x. Each is None if the instructions do not
    ask for it.
    """

    steps: int
    lr: float
    control: F32 | None
    loss: float | None = None


@np.errstate(over="ignore", invalid="ignore")  # The server rejects and reports updates that diverged.
def sgd(
    model: FlatModel,
    inputs: Tensor,
    labels: Tensor,
    batches: Iterable[I64],
    instructions: Instructions,
    *,
    x: F32 | None = None,
    previous: FlatModel | None = None,
    options: LocalOptions | None = None,
) -> Work:
    """Take one step for each minibatch, as the instructions specify; the model changes from x_t to y.

    grad is the gradient of the minibatch's mean cross entropy, plus weight_decay times the point.

    Args:
        model: holds x_t, and afterwards y: ``model.flat`` is changed in place.
        inputs, labels: float32[m, ...] and int64[m] on the model's device, read-only.
        batches: indices of examples, int64[b] each.
        instructions: the instructions to the client; their ``x_prev`` and local rule are ignored.
        x: float32[n_parameters], x_t; needed if ``mu`` is not 0.
        previous: a copy of the model that holds x_{t-1}; needed if ``b`` is not 0. Its parameters do not change; its
            BatchNorm statistics have no meaning.
        options: weight decay, momentum and clipping. Default: none.

    Cost: besides the forward and backward pass, a step has two gathers, a pass that clears ``grad``, and a pass of
        ``kernels.direction_step``. Minibatches, offset and x are copied to a GPU once each, before the first step; no
        step waits for the GPU.
    """
    options = options or LocalOptions()
    steps = 0
    control = torch.zeros_like(model.parameters) if instructions.second else None
    if not instructions.b:
        previous = None
    velocity = torch.zeros_like(model.parameters) if options.momentum else None
    grad_prev = None if previous is None else previous.grad
    vectors = Vectors(model.parameters, model.grad, instructions.offset, x, grad_prev, control, velocity)
    descent = Descent(vectors, (instructions.a, instructions.b, instructions.mu), options)
    frozen = [(view, view.clone()) for view in map(model.parameters.__getitem__, model.frozen)]
    in_order = map(torch.from_numpy, batches) if model.device.type == "cpu" else split_on(model.device, list(batches))
    for steps, batch in enumerate(in_order, start=1):
        examples = inputs.index_select(0, batch), labels.index_select(0, batch)
        _gradient(model, examples, options)
        if previous is not None:
            _gradient(previous, examples, options)
            previous.grad.add_(previous.parameters, alpha=options.weight_decay)
        descent.step(rate_of(instructions, steps - 1))
        for view, value in frozen:  # weight decay and offsets do not move them either
            view.copy_(value)
    mean = None if control is None else on_host(control)
    if mean is not None and steps:
        mean /= np.float32(steps)
        for fixed in model.frozen:
            mean[fixed] = 0
    return Work(steps, mean_rate(instructions, steps), mean)


SCORED = 500
"""Examples per call of ``scored``: enough to hide the cost of a call, few enough for LeNet's activations to stay in
cache (10,000 images on one core: 0.33 s; with 1,000 per call 0.54 s)."""


def scored(model: FlatModel, inputs: Tensor, labels: Tensor, part: I64 | None = None) -> tuple[float, float]:
    """Return accuracy and mean cross entropy over the examples with these indices, or over all, in evaluation mode."""
    if not (count := len(labels) if part is None else len(part)):
        raise RangeError("labels: there are no examples to evaluate")
    correct, loss = 0, 0.0
    model.module.eval()
    with torch.inference_mode():
        for start in range(0, count, SCORED):
            batch: Any = slice(start, start + SCORED)
            if part is not None:
                batch = torch.from_numpy(part[batch]).to(model.device)
            scores, own = model.module(inputs[batch]), labels[batch]
            correct += int((scores.argmax(1) == own).sum())
            loss += float(cross_entropy(scores, own, reduction="sum"))
    return correct / count, loss / count


def mean_loss(model: FlatModel, inputs: Tensor, labels: Tensor, part: I64 | None = None) -> float:
    """Return the mean cross entropy of ``scored``; the model is in training mode afterwards."""
    _, loss = scored(model, inputs, labels, part)
    model.module.train()
    return loss


def _gradient(model: FlatModel, examples: tuple[Tensor, Tensor], options: LocalOptions) -> None:
    """Write the clipped gradient of the mean cross entropy into ``model.grad``."""
    model.grad.zero_()
    cross_entropy(model.module(examples[0]), examples[1]).backward()  # type: ignore[no-untyped-call]
    if options.clip is None:
        return
    if model.device.type == "cpu":
        model.grad.mul_(min(1.0, options.clip / max(float(model.grad.norm()), 1e-30)))
    else:  # The same formula, without waiting for the device.
        model.grad.mul_((options.clip / model.grad.norm().clamp(min=1e-30)).clamp(max=1.0))


# torch's devices and random numbers.


def torch_device(name: str) -> torch.device:
    """Return torch's device with a given name: ``"cpu"``, ``"cuda:0"``, or ``"cuda"`` for the first GPU.

    An unknown kind of device raises an UnknownNameError, a missing device a DeviceError.

    >>> torch_device("cpu")
    device(type='cpu')
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UnknownNameError.of("device", name, KNOWN)
    if name == "cpu":
        return CPU
    if (reason := _missing()) is not None:
        raise DeviceError(f"device={name!r}: torch has no GPU: {reason}")
    number = int(name[5:] or 0)
    if number >= (count := torch.cuda.device_count()):
        raise DeviceError(f"device={name!r}: does not exist; torch's last GPU is 'cuda:{count - 1}'")
    return torch.device("cuda", number)


def device_facts(name: str) -> dict[str, str]:
    """Return facts about a device for records: its name, and for a GPU its model and torch's CUDA version.

    >>> device_facts("cpu")
    {'name': 'cpu'}
    """
    device = torch_device(name)
    if device.type == "cpu":
        return {"name": name}
    return {"name": name, "is": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


def moved(array: F32, device: torch.device) -> torch.Tensor:
    """Copy an array, float32 of any shape, to a device."""
    return torch.from_numpy(array.copy()).to(device)


def on_host(tensor: torch.Tensor) -> F32:
    """Return a tensor as a NumPy array: a view in host memory, or a copy from a GPU."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()


def split_on(device: torch.device, indices: list[np.ndarray]) -> Sequence[torch.Tensor]:
    """Copy the indices of several minibatches, int64[b] each, to a device in one transfer."""
    joined = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *indices])).to(device)
    return torch.split(joined, [len(one) for one in indices])


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Compute a GPU's products and convolutions in float32, by algorithms with reproducible bits.

    This disables TensorFloat-32, and cuDNN's algorithms that add in a random order or that a benchmark selects. The
    settings apply to the whole process, and are restored at the end. On the CPU, nothing changes.
    """
    if device.type == "cpu":
        yield
        return
    products = torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = products


def synchronize(device: torch.device) -> None:
    """Wait for all operations of a device."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def _missing() -> str | None:
    """Return the reason why torch has no GPU, or None if it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs only; install one that is built for CUDA, or use 'cpu'"
    return f"torch {torch.__version__} finds no GPU or no driver for CUDA {torch.version.cuda}; see nvidia-smi"


@contextmanager
def seeded(seed: int, purpose: str, *, round: int = 0, client: int = 0, device: torch.device = CPU) -> Iterator[None]:
    """Seed torch's random numbers inside the block, and restore their state afterwards.

    The seed is that of ``fedcore.runtime.generator`` with these arguments. A GPU is seeded in addition to the CPU, and
    draws different numbers from the same seed. Cost: about 45 microseconds.
    """
    number = int(generator(seed, purpose, round=round, client=client).integers(2**63))
    gpus = [device] if device.type != "cpu" and torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=gpus):
        # torch.manual_seed would also seed other accelerators, whose state is not forked.
        torch.default_generator.manual_seed(number)
        if gpus:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)
        yield
