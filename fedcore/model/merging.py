"""Rounds over models in files: from disk to disk, in windows, resumable."""

import fcntl
import hashlib
import json
import math
import os
import re
import stat
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms.optimizers import Optimizer, as_optimizer, rate_of, started, turn
from fedcore.arrays import F64, NARROW, dtype_name, empty, ieee
from fedcore.errors import (
    ArrayError,
    DivergedError,
    FedcoreError,
    LockedError,
    RangeError,
    StoreError,
    UnknownNameError,
)
from fedcore.files import (
    FOLDER,
    OpenFolder,
    is_own,
    open_file,
    opened,
    replacing,
    require_same,
    resolve_own_links,
    sync_folder,
)
from fedcore.kernels import Linear
from fedcore.kernels.aggregate import Summed
from fedcore.kernels.robust import GramSum
from fedcore.model import averaging, policy
from fedcore.model.files import BESIDE, FORMS, bytes_of, files_beside, open_model
from fedcore.model.layout import LOGGER, shown_names
from fedcore.model.lora import ADAPTER, ADAPTER_MODEL, Adapters, check_way, equal_adapters
from fedcore.model.policy import TensorForm, TensorPolicy, cast, is_finite, is_mask, matches, settled, why_not_finite
from fedcore.model.safetensors import (
    BYTES,
    TORCH_SUFFIXES,
    Safetensors,
    StoredTensor,
    header_of,
    over,
    read_header,
    read_json,
)
from fedcore.model.windows import Digest, Part, Windows, add_to, check_model, require_unchanged
from fedcore.rules import Chain, Combination, Rule
from fedcore.runtime import __version__
from fedcore.validation import absolute, check_number, shorten

SAFE = 256 << 20
"""The bytes of output between two records of the progress."""
QUEUED = 3
"""The number of windows that wait to be written."""
REPORT, PROGRESS, MOMENTS = "merge.json", "progress.json", Path("optimizer", "moments.safetensors")
MODEL = "model.safetensors"
_DRAFT = re.compile(r"\..+\.[0-9a-f]{12}")
"""The name of a file that a killed merge was replacing."""
OUTSIDE = "differs, and is not merged (only, ignore); pass --base, or base=, with the model whose tensors to keep"
"""The remedy for tensors that are not merged, without a base."""
NOTHING = np.empty(0, np.float32)
"""The moment of a tensor that the optimizer does not move."""

Progress = Callable[[int, int], object]


class Target(NamedTuple):
    """A file of the result: its path in the folder, its header, and its size."""

    path: Path
    header: bytes
    size: int


class _Step(NamedTuple):
    """What happens to the average of the inputs, or in its place, and the model before it."""

    base: Any
    optimizer: Optimizer | None
    server_lr: float | None
    clip_norm: float | None
    chain: Chain | None

    def check(self, weights: Any) -> None:
        """Raise RangeError if the options do not fit each other."""
        if self.chain is not None:
            averaging.require_no_weights(weights)
            if (c := self.clip_norm) is not None:
                raise RangeError(f"clip_norm={c:g}: not supported with a rule; pass rule=ClipNorm({c:g})")
        if self.base is None and self[1:4] != (None,) * 3:
            need = "an optimizer, a server rate and clipping need the model before the round"
            raise RangeError(f"base: is missing; {need}")
        if not getattr(self.optimizer, "elementwise", True):
            raise RangeError(f"optimizer={self.optimizer!r}: must be elementwise to work in windows")
        for name, number in (("server_lr", self.server_lr), ("clip_norm", self.clip_norm)):
            if number is not None:
                check_number(name, number, "(0, inf)")


class _Restart(BaseException):  # it is caught in this module, and passes a rule of a user
    """The merge starts again, because an input is rejected or a tensor is a constant."""


def merge(
    out: str | os.PathLike[str],
    inputs: Iterable[str | os.PathLike[str]],
    weights: Any = None,
    *,
    base: str | os.PathLike[str] | None = None,
    key: str | None = None,
    optimizer: Optimizer | str | None = None,
    server_lr: float | None = None,
    clip_norm: float | None = None,
    rule: str | Rule | Sequence[Rule | str] | None = None,
    lora: str = "average",
    rank: int | None = None,
    only: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Take a round of FedAvg over models in files, in windows, and write the result to a new folder.

    Without a base the result is the weighted average of the inputs. With a base x and an optimizer, a rate or clipping,
    the result is x - gamma u; u is v = sum_i w_i (x - y_i) / sum_i w_i, or what the optimizer makes of v. A robust rule
    replaces the weighted average of the inputs, or v; with a base, the result is then always a step.

    - Float tensors are averaged; counters become their largest value; other tensors must be equal, as in ``aggregate``.
    - The step is in float32, as in a server. It does not move BatchNorm statistics, which are averaged. With a 16-bit
      base a warning is logged: the result is rounded to 16 bits, which loses small steps.
    - An input with a NaN or an infinity is rejected, and the merge starts again without it.
    - A killed merge continues if it is called again with the same arguments and files. It checks the windows that were
      written before. The folder appears by one rename, as a whole.

    Args:
        out: a new folder. It gets the files of the base (or of the first input), in its dtypes and with its shards;
            the file ``merge.json``; with moments ``optimizer/moments.safetensors``; and the configurations and
            tokenizers beside the models, of the base or else of the first model that has the file.
        inputs: k paths, in a sequence or from an iterator, of safetensors files, folders or indices, of torch files
            (.pt, .pth, .bin, .ckpt) or of .npz files. A model may lack or repeat names of tied tensors. LoRA adapters
            in folders must have the same targets, and with ``lora="average"`` the same rank and scale.
        weights: as for ``aggregate``.
        base: the model from which the inputs were trained. If it is the result of a merge with an optimizer, pass the
            same optimizer, which continues with its moments, or delete the base's ``merge.json``.
        key: the key of the ``state_dict`` in torch files with several entries.
        optimizer: an elementwise server optimizer, such as ``Nesterov()``, or its name.
        server_lr: gamma. Default: the optimizer's rate, or 1.
        clip_norm: the largest norm of an update x - y_i over all parameters; a longer one is scaled down.
        rule: a robust rule, as for ``aggregate``. Not allowed with weights and ``clip_norm``.
        lora: how LoRA adapters of PEFT are combined. "average" averages A and B apart, which is not the average of the
            products B A (FedIT). "product" averages the products: sum_k w_k s_k B_k A_k / sum_k w_k is factored again,
            with the smallest error for its rank (FlexLoRA). s_k is the adapter's scale, lora_alpha / r, or with
            ``use_rslora`` lora_alpha / sqrt(r). "stack" has the same sum, without an error: the products stand side by
            side, and the rank is the sum of the ranks (FLoRA). Both take any ranks and scales, for equal base weights;
            the result has the first adapter's scale, and no base, step or rule. Other tensors are averaged.
        rank: the largest rank with ``lora="product"``. Default: for each product the largest one of the adapters.
        only: name patterns of the tensors that are merged, such as ``["layers.0.*", "layers.1.*"]``. A pattern of one
            name of a tied tensor counts for all. Other tensors, and their moments, are those of the base, and inputs
            may lack them. Without a base they must be equal in all inputs. An optimizer's rate counts the rounds of
            each tensor; tensors with different rates are refused. Norms, clipping and rules see only these tensors, as
            do the digests of inputs if there is a base. Not with products. Default: all tensors.
        ignore: name patterns of tensors that are not merged, also if ``only`` has them. Default: none.
        progress: called with the bytes that were read and their total.

    Returns:
        The content of ``merge.json``: weights, digest and norm of each input (None, and null in the file, for float64
        norms above 1e154), rejections, norms of each tensor, and the tied names, which the next round knows. A
        digest depends on names, dtypes, shapes and bytes of the tensors, not on their order and files. With products:
        their norms, their ranks, and as ``error``, for each and in total, the share of the Frobenius norm that the
        factors of this rank lose, before they are rounded to the first adapter's dtype.

    Raises:
        ArrayError, ShapeError, DtypeError, RangeError: files, names, shapes, constants or arguments are invalid, the
            moments are not those of the base, all inputs with a weight are rejected, or tensors that are tied in the
            base or first model differ in the result.
        StoreError: a file cannot be read, ``out`` exists and is not the result of this merge, or the folder
            ``.out.part`` beside it is not one that a killed merge of yours has left.
        LockedError: a different process merges into ``out``.
        CorruptionError: an input was changed during the merge.
        DivergedError: the result is not finite, or exceeds its dtype or, with a rule, float32.
        OSError: the disk is full or fails. Call the function again to continue.

    Determinism: without an optimizer, rate or clipping, the bits of ``aggregate``; else float64 sums that are rounded
        to v in float32, and the optimizer's own arithmetic. With a rule, the parameters have the bits of a round
        of FedAvg with this rule from the base, or of ``aggregate`` without one.
        Products are computed in float64 by LAPACK, whose last bits depend on the machine.
    Cost: reads every file once, twice with ``clip_norm`` or a rule that needs distances, and writes the result. Memory:
        160 MiB of windows, and three windows of the result, for a model of any size and up to about 100 inputs. With
        products about 50 R (m + n) bytes for the largest product, of m by n numbers, where R is the sum of the ranks.

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
        arXiv 2311.08105, for ``Nesterov``.
    """
    averaging.require_several("inputs", inputs, Mapping)
    if not (paths := [*inputs]):
        raise RangeError("inputs: must not be empty")
    patterns = {"only": only, "ignore": ignore}
    others = dict(base=base, optimizer=optimizer, server_lr=server_lr, clip_norm=clip_norm, rule=rule, **patterns)
    check_way(lora, rank, **others)
    chain = None if rule is None else Chain.of_models(rule, has_base=base is not None)
    step = _Step(base, as_optimizer(optimizer), server_lr, clip_norm, chain)
    step.check(weights)
    target = resolve_own_links(absolute(out, "out"))
    if target.suffix.lower() in (*FORMS, *TORCH_SUFFIXES):
        raise StoreError(f"{target}: the result is a folder; pass a name without {target.suffix}")
    job = _Job(paths, weights, key, step, (lora, rank), patterns)
    if os.path.lexists(target):
        return job.finished(target)
    if narrow := {form.dtype for form in job.plan.values() if job.is_stepped(form)} & set(NARROW):
        loses = "so the result loses steps below its precision; use a float32 copy of the base"
        LOGGER.warning(f"base: is {', '.join(sorted(narrow))}, {loses}")
    files = {str(one.path) for one in job.targets()} | {REPORT, PROGRESS, ADAPTER, str(MOMENTS), *job.copies}
    with _part_of(target, files) as part:
        if os.path.lexists(target):
            return job.finished(target)
        while True:
            try:
                report = job.run(part, progress or (lambda done, total: None))
                break
            except _Restart:
                _clear(part)
            except FedcoreError:
                _clear(part, kept=None)
                with suppress(OSError):
                    os.rmdir(part.path)
                raise
        require_same(part.path, os.fstat(part.fd), os.lstat(part.path))
        os.rename(part.path, target)
        require_same(target, os.fstat(part.fd), os.lstat(target))
        sync_folder(target.parent)
        _show(part)
    return report


@contextmanager
def _part_of(target: Path, files: set[str]) -> Iterator[OpenFolder]:
    """Lock the folder that becomes the result. Only this user may have access to it until then."""
    path = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path, FOLDER)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be created: {getattr(error, 'strerror', error)}") from None
    part = OpenFolder(path, fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.lexists(target):  # else a different process has finished and renamed the folder
                require_same(path, os.fstat(fd), os.lstat(path))
        except (OSError, StoreError):
            reason = "a different process merges into it; wait for it, or choose another name"
            raise LockedError(f"{target}: {reason}") from None
        if is_own(path, os.fstat(fd)) and not os.listdir(fd):
            os.fchmod(fd, 0o700)
        if not os.path.lexists(target) and (problem := _problem(part, files)):
            advice = f"move it, or choose another name than {target.name}"
            raise StoreError(f"{path}: is not the folder of a merge: {problem}; {advice}")
        yield part
    finally:
        os.close(fd)


def _problem(part: OpenFolder, files: set[str]) -> str | None:
    """Return why a folder is not one that a killed merge has left; ``files`` are the names of its result."""
    found, entries = os.fstat(part.fd), dict(_entries(part))
    if not is_own(part.path, found) or found.st_mode & 0o077:
        return "other users have access to it"
    if PROGRESS not in entries and any(not name.startswith(f".{PROGRESS}") for name in entries):
        return f"it has no {PROGRESS}"
    for name, found in entries.items():
        is_file = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        is_valid = is_file and (name in files or _DRAFT.fullmatch(name) or BESIDE.fullmatch(name))
        is_valid = is_valid or (name == str(MOMENTS.parent) and stat.S_ISDIR(found.st_mode))
        if not is_valid or not is_own(part.path / name, found):
            return f"{shorten(name)} is not a file of this merge, or is a link or another user's"
    return None


def _entries(part: OpenFolder) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and the status of each entry of a folder, first those in its folder of moments."""
    for name in os.listdir(part.fd):
        found = os.stat(name, dir_fd=part.fd, follow_symlinks=False)
        if name == str(MOMENTS.parent) and stat.S_ISDIR(found.st_mode):
            with opened(name, FOLDER, part.fd) as inner:
                for one in os.listdir(inner):
                    yield f"{name}/{one}", os.stat(one, dir_fd=inner, follow_symlinks=False)
        yield name, found


def _clear(part: OpenFolder, kept: str | None = PROGRESS) -> None:
    """Delete the files of a merge, and no others: ``_problem`` has checked the folder."""
    for name, found in _entries(part):
        if stat.S_ISDIR(found.st_mode):
            os.rmdir(name, dir_fd=part.fd)
        elif name != kept:
            os.unlink(name, dir_fd=part.fd)


def _show(folder: OpenFolder) -> None:
    """Give a finished folder the rights of its files, and delete the record of the progress."""
    rights = stat.S_IMODE(os.stat(REPORT, dir_fd=folder.fd, follow_symlinks=False).st_mode)
    os.fchmod(folder.fd, stat.S_IMODE(os.fstat(folder.fd).st_mode) | rights | (rights & 0o444) >> 2)
    os.unlink(PROGRESS, dir_fd=folder.fd)


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass
class _State:
    """What a record of the progress holds; ``digests`` are of the inputs, the base, the result and the moments."""

    digests: list[Digest]
    rejected: dict[str, str] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)
    clips: list[float] | None = None
    done: int = 0
    squares: dict[str, list[float]] = field(default_factory=dict)
    products: list[list[float]] | None = None
    first: list[str] | None = None

    def restarted(self) -> "_State":
        """Return the state in which the merge starts again."""
        return _State([Digest() for _ in self.digests], self.rejected, self.constants)

    def text(self, fingerprint: str) -> str:
        digests = [digest.state() for digest in self.digests]
        content = json.dumps(vars(self) | {"digests": digests, "fingerprint": fingerprint})
        return json.dumps({"content": content, "checksum": _checksum(content)})


class _Job:
    """The arguments of a merge, its open models, and its plan; ``copies`` are the further files of the result."""

    def __init__(self, inputs: list[Any], weights: Any, key: Any, step: _Step, way: tuple[str, Any], of: Any) -> None:
        base, self.optimizer, server_lr, self.clip_norm, self.chain = step
        averaging.shares_of(weights, len(inputs))
        self.weights = [1.0] * len(inputs) if weights is None else [float(weight) for weight in weights]
        self.paths = [str(absolute(path, "inputs")) for path in inputs]
        self.base_path = None if base is None else str(absolute(base, "base"))
        self.labels = [f"client {i} ({shorten(path)})" for i, path in enumerate(self.paths)]
        labeled = {} if self.base_path is None else {"base": self.base_path}
        labeled |= dict(zip(self.labels, self.paths, strict=True))
        self.lora = None if way[0] == "average" else Adapters(labeled, *way, key)
        adapter = self.lora.config if self.lora else next(iter(equal_adapters(labeled).values()), (0, None))[1]
        self.main = MODEL if adapter is None else ADAPTER_MODEL
        models = [*self.lora.others] if self.lora else [open_model(path, key=key) for path in self.paths]
        self.base = None if base is None else open_model(self.base_path, key=key)
        self.pattern = models[0] if self.base is None else self.base
        self.plan = TensorPolicy().plan(self.labels[0] if base is None else "base", self.pattern)
        place = Path(self.base_path or "")
        self.report_path = (place if os.path.isdir(place) else place.parent) / REPORT
        self.report = self._report()
        self.ties = self.report.get("ties", {}) | policy.ties_of(self.pattern)
        given = ((option, one) for option, one in of.items() if one is not None)
        self.patterns = {option: [one] if isinstance(one, str) else [*one] for option, one in given}
        self.chosen = self._chosen()
        due = self.plan if base is None else {name: self.plan[name] for name in self.chosen}
        for i, model in enumerate(models):
            model = policy.matched(model, self.plan, self.ties)
            advice = f"pass models with the tensors of {shorten(self.base_path or self.paths[0])}"
            for names, why in ((self.chosen, advice), (due, OUTSIDE)):
                try:
                    sent = {name: leaf for name, leaf in model.items() if name in names or name not in self.plan}
                    check_model(self.labels[i], sent, {name: self.plan[name] for name in names})
                except FedcoreError as error:
                    raise type(error)(f"{error}; {why}") from None
            models[i] = {name: model[name] if name in due else NOTHING for name in self.plan}
        self.models, self.forms = models, self.lora.plans[-1] if self.lora else self.plan
        self.copies = files_beside(labeled, {} if adapter is None else {ADAPTER: adapter})
        self.copies |= dict([index] if (index := getattr(self.pattern, "index", None)) else [])
        self.steps = base is not None and step[1:] != (None,) * 4
        self.moments = 0 if self.optimizer is None else len(started(self.optimizer, 1))
        self.round, self.idle, self.old_moments = self._before()
        for name in self.plan.keys() - self.chosen:
            self.plan[name] = self.plan[name]._replace(kind="constant")
        rate = self._rate() if server_lr is None else None
        self.gamma = float(next(value for value in (server_lr, rate, 1.0) if value is not None))
        facts = [__version__, self.weights, self.gamma, repr(self.optimizer), self.clip_norm, key]
        facts += [self.round, self.steps, *([] if self.chain is None else [repr(self.chain)])]
        facts += [*way, repr(self.lora.config), self.lora.scales] if self.lora else []
        facts += [sorted(self.chosen)] if self.patterns else []
        facts += [[name, hashlib.blake2b(content).hexdigest()] for name, content in self.copies.items()]
        states = [_state_of(model) for model in (*(self.lora or self).models, self.pattern, *self.old_moments)]
        self.fingerprint = hashlib.blake2b(json.dumps([facts, self.paths, states]).encode(), digest_size=16).hexdigest()

    def _chosen(self) -> dict[str, None]:
        """Return the names of the tensors that are merged, in order."""
        of = {name: self.ties.get(name, name) for name in self.plan}
        chosen = {*of.values()}
        for option, patterns in self.patterns.items():
            if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
                raise RangeError(f"{option}={patterns!r:.100}: must be patterns of names; or leave it out")
            if odd := [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in self.plan)]:
                names = f"{len(self.plan)} tensors are {shown_names(self.plan, 300)}"
                raise UnknownNameError(f"{option}={odd[0]!r:.100}: no tensor matches; the {names}")
            found = {of[name] for name in self.plan if matches(name, patterns)}
            chosen = chosen - found if option == "ignore" else found
            if not chosen:
                raise RangeError(f"ignore={patterns!r:.100}: no tensor is left to merge; pass fewer patterns")
        return {name: None for name in self.plan if of[name] in chosen}

    def _rate(self) -> float | None:
        """Return the optimizer's rate, which counts the rounds of the tensors."""
        names = self._stepped()
        rounds = {self.round - self.idle.get(name, 0): name for name in reversed(names)} or {self.round: ""}
        rates = {rate_of(self.optimizer, round): (name, round) for round, name in rounds.items()}
        if len(rates) > 1:
            (one, n), (other, m), *_ = rates.values()
            had = f"{one} has had {n} rounds, and {other} {m}"
            raise RangeError(f"only: {had}, so the optimizer has two rates; merge them one after the other")
        return next(iter(rates))

    def _report(self) -> dict[str, Any]:
        """Return the report of the base, if it is the result of a merge."""
        path = self.report_path
        report = read_json(path)[0] if self.base_path and os.path.lexists(path) else {}
        if "fingerprint" not in report:
            return {}
        round, ties, plan = report.get("round"), report.get("ties", {}), self.plan
        if type(round) is not int or not 0 <= round < 2**53:
            raise ArrayError(f"{path}: round={round!r:.100}: must be an integer >= 0; copy it again")
        if not isinstance(ties, dict) or any(plan.get(one, 0) != plan.get(str(ties[one])) for one in ties):
            raise ArrayError(f"{path}: its ties are not those of the base; copy the folder again")
        return report

    def _before(self) -> tuple[int, dict[str, int], list[Mapping[str, Any]]]:
        """Return the number of this round, the rounds that tensors did not have, and the moments.

        They are those in the base, if it is the result of a merge.
        """
        report, path = self.report, self.report_path.parent / MOMENTS
        after, described = report.get("round", -1) + 1, report.get("optimizer")
        idle, having = report.get("idle", {}), report.get("moments", [*self.plan])
        is_valid = isinstance(idle, dict) and idle.keys() <= self.plan.keys() and isinstance(having, list)
        if not is_valid or not all(type(one) is int and 0 <= one <= after for one in idle.values()):
            raise ArrayError(f"{self.report_path}: its tensors are not those of the base; copy the folder again")
        advice = f"delete {self.report_path} and {MOMENTS.parent} to start with new moments"
        if self.optimizer is None and described is not None and self.patterns:
            raise RangeError(f"base: has moments of {described!r:.200}; pass the same optimizer, or {advice}")
        if self.optimizer is None or (described is None and not os.path.exists(path)):
            return after, idle, []
        if described != _described(self.optimizer):
            raise RangeError(f"base: its moments are those of {described!r:.200}; pass the same optimizer, or {advice}")
        stored: Mapping[str, StoredTensor] = Safetensors(path) if os.path.exists(path) else {}
        forms = self._moment_forms([name for name in self._stepped() if name in having])
        due = {name: f"{kind}{list(shape)}" for name, (kind, shape) in forms.items()}
        found = {name: f"{tensor.kind}{list(tensor.shape)}" for name, tensor in stored.items()}
        for name in sorted(due.keys() | found.keys()):
            of = name.partition("/")[2]
            if due.get(name) != found.get(name) and (name in found or not is_mask(of, self.pattern[of])):
                differ = f"{shorten(name)}: expected {due.get(name, 'nothing')}, got {found.get(name, 'nothing')}"
                raise ArrayError(f"{path}, {differ}; copy the folder of the base again, or {advice}")
        turns, plan = range(self.moments), self.plan
        return after, idle, [{name: stored.get(f"{i}/{name}", NOTHING) for name in plan} for i in turns]

    def _stepped(self) -> list[str]:
        return [name for name, form in self.plan.items() if self.is_stepped(form)]

    def with_moments(self) -> list[str]:
        """Return the tensors that have moments in the result: those of the step, and those that had some before."""
        old = next(iter(self.old_moments), {})
        kept = [name for name, moment in old.items() if moment is not NOTHING and name not in self.chosen]
        return [*self._stepped(), *kept]

    def _moment_forms(self, names: Sequence[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtypes and shapes of a file with the moments of these tensors."""
        return {f"{i}/{name}": ("float32", self.plan[name].shape) for i in range(self.moments) for name in names}

    def finished(self, target: Path) -> dict[str, Any]:
        """Return the report of a finished merge with the same arguments; raise StoreError for any other path."""
        with suppress(FedcoreError, OSError), opened(target, FOLDER) as fd:
            folder = OpenFolder(target, fd)
            report, _ = read_json(target / REPORT, folder)
            if report.get("fingerprint") == self.fingerprint and is_own(target, os.fstat(fd)):
                if PROGRESS in os.listdir(fd):
                    _show(folder)
                return report
        raise StoreError(f"{target}: exists; choose another name, or move it")

    def run(self, part: OpenFolder, progress: Progress) -> dict[str, Any]:
        """Merge into a folder, from the start or from its record of the progress."""
        sources = len(self.models) + (self.base is not None) + 1 + self.moments
        for name in filter(_DRAFT.fullmatch, os.listdir(part.fd)):
            os.unlink(name, dir_fd=part.fd)
        state, saved = _State([Digest() for _ in range(sources)]), dict[str, Any]()
        with suppress(FedcoreError):  # a record that is damaged is worthless
            found, _ = read_json(part.path / PROGRESS, part)
            if found.get("checksum") == _checksum(str(found.get("content"))):
                saved = json.loads(found["content"])
        if saved.pop("fingerprint", None) == self.fingerprint:
            state = _State([Digest(one) for one in saved.pop("digests")], **saved)
        else:
            _clear(part)
            with replacing(Path(PROGRESS), folder=part) as file:
                file.write(state.text(self.fingerprint))
        for name in state.constants:
            self.plan[name] = self.plan[name]._replace(kind="constant")
        with closing(_Output(part, self.targets(), self.moments, self.fingerprint)) as output:
            pass_ = _Pass(self, state, output, progress)
            if self.lora is not None or (state.done and not pass_.is_intact()):
                state = state.restarted()
                pass_ = _Pass(self, state, output, progress)
            if self.clip_norm is not None and state.clips is None:
                pass_.clip(self.clip_norm)
            if self.chain is not None:
                pass_.combine(self.chain)
            pass_.run()
        merged = ChainMap(*(read_header(part.path / one.path, part).tensors for one in self.targets()))
        policy.require_tied(self.base_path or self.paths[0], self.ties, merged)
        text = json.dumps(pass_.report(), default=str)
        report: dict[str, Any] = json.loads(text, parse_constant=lambda name: None)  # JSON has no infinities
        with replacing(Path(REPORT), folder=part) as file:
            json.dump(report, file, indent=1)
        for name, content in self.copies.items():
            with replacing(Path(name), "wb", part) as file:
                file.write(content)
        return report

    def targets(self) -> list[Target]:
        """Return the files of the result: those of the pattern, and one for the moments."""
        if isinstance(self.pattern, Safetensors):
            names = [Path(header.file.path).name for header in self.pattern.headers]
            names = [self.main] if self.pattern.index is None else names
            if odd := [name for name in names if name.startswith(".") or not name.endswith(".safetensors")]:
                raise ArrayError(f"{self.pattern.path}: names {shorten(odd[0])}; name the files *.safetensors")
            each = zip(names, self.pattern.headers, strict=True)
            found = [Target(Path(name), header.text, header.file.state[2]) for name, header in each]
        else:
            found = [_target(Path(self.main), {name: (form.dtype, form.shape) for name, form in self.forms.items()})]
        moments = self._moment_forms(self.with_moments())
        return [*found, *([_target(MOMENTS, moments)] if moments else [])]

    def of_fragments(self) -> dict[str, Any]:
        """Return the entries of the report if not all tensors had all rounds, or have moments."""
        idle = {name: n for name in self.plan if (n := self.idle.get(name, 0) + (name not in self.chosen))}
        found: dict[str, Any] = dict(self.patterns)
        having = self.with_moments()
        if self.moments and self.plan.keys() - self.chosen - {*having}:
            found["moments"] = having
        return found | ({"idle": idle} if idle else {})

    def is_stepped(self, form: TensorForm) -> bool:
        """Whether the server's step moves a tensor; other float tensors are averaged."""
        return self.steps and form.kind == "parameter"


def _described(one: Optimizer | Rule | None) -> Any:
    return None if one is None else {"name": type(one).__name__, **vars(one)}


def _target(path: Path, forms: Mapping[str, tuple[str, tuple[int, ...]]]) -> Target:
    order = sorted(forms, key=lambda name: -BYTES[forms[name][0]])
    header = header_of(((name, *forms[name]) for name in order), {"format": "pt"})
    return Target(path, header, len(header) + sum(BYTES[kind] * math.prod(shape) for kind, shape in forms.values()))


def _state_of(model: Mapping[str, Any]) -> list[Any]:
    """Return the files of a model with their sizes and times, and digests of tensors that were read into memory."""
    leaves = [(name, leaf) for name, leaf in model.items() if math.prod(leaf.shape)]
    files = {(leaf.file.path, *leaf.file.state) for _, leaf in leaves if isinstance(leaf, StoredTensor)}
    read = [(name, bytes_of(leaf)) for name, leaf in leaves if not isinstance(leaf, StoredTensor)]
    return [*sorted(files), *((name, hashlib.blake2b(memory.data).hexdigest()) for name, memory in read)]


class _Output:
    """The files of the result. One thread writes and syncs them, in the order of the calls.

    Attributes:
        tensors: the tensors of the result, and those of each moment.
    """

    def __init__(self, folder: OpenFolder, targets: Sequence[Target], moments: int, fingerprint: str) -> None:
        self._folder, self._fingerprint, self._since = folder, fingerprint, 0
        self._fds: dict[str, int] = {}
        self._pending: deque[Future[None]] = deque()
        self._writer = ThreadPoolExecutor(1)
        self.tensors: list[dict[str, StoredTensor]] = [{} for _ in range(1 + moments)]
        for target in targets:
            path = folder.path / target.path
            if target.path.parent.name:
                with suppress(FileExistsError):
                    os.mkdir(target.path.parent, dir_fd=folder.fd)
            self._fds[str(path)] = fd = open_file(target.path, os.O_RDWR | os.O_CREAT, folder)
            os.ftruncate(fd, target.size)
            os.pwrite(fd, target.header, 0)
            sync_folder(target.path.parent, folder)
            for name, tensor in read_header(path, folder).tensors.items():
                moment, _, of = name.partition("/") if target.path == MOMENTS else ("-1", "", name)
                self.tensors[int(moment) + 1][of] = tensor

    def close(self) -> None:
        """Stop the writer, and close the files."""
        self._writer.shutdown(cancel_futures=True)
        for fd in self._fds.values():
            os.close(fd)

    def write(self, part: Part, vectors: Sequence[Any]) -> None:
        """Write a part of the result and of each moment, later."""
        for tensors, vector in zip(self.tensors, vectors, strict=False):
            tensor, memory = tensors[part.name], bytes_of(vector)
            start = tensor.start + part.start * tensor.itemsize
            self._submit(_write, self._fds[tensor.file.path], memory, start)
            self._since += memory.size

    def record(self, state: _State, *, now: bool = False) -> None:
        """Record the progress if enough was written since the last record."""
        if now or self._since >= SAFE:
            self._since = 0
            self._submit(self._sync, state.text(self._fingerprint))
        if now:
            while self._pending:
                self._pending.popleft().result()

    def _submit(self, call: Callable[..., None], *arguments: Any) -> None:
        while len(self._pending) > QUEUED:
            self._pending.popleft().result()
        self._pending.append(self._writer.submit(call, *arguments))

    def _sync(self, text: str) -> None:
        for fd in self._fds.values():
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with replacing(Path(PROGRESS), folder=self._folder) as file:
            file.write(text)


def _write(fd: int, memory: npt.NDArray[np.uint8], start: int) -> None:
    done = 0
    while done < memory.size:
        done += os.pwrite(fd, memory[done:].data, start + done)


class _Pass:
    """One pass over the windows of a merge, from the inputs that are not rejected to the output."""

    def __init__(self, job: _Job, state: _State, output: _Output, progress: Progress) -> None:
        self._job, self._state, self._output, self._progress = job, state, output, progress
        self._kept = [i for i in range(len(job.models)) if str(i) not in state.rejected]
        if not any(job.weights[i] for i in self._kept):
            reasons = "; ".join(list(state.rejected.values())[:3])
            raise ArrayError(f"inputs: all with a weight were rejected ({shorten(reasons)}); pass finite models")
        kept = np.asarray([job.weights[i] for i in self._kept])
        self._shares = averaging.shares_of(kept, len(kept))
        self._base = [] if job.base is None else [job.base]
        self._sources = [*self._kept, *([len(job.models)] if self._base else [])]
        self._models = [*(job.models[i] for i in self._kept), *self._base]
        self._windows = Windows([*self._models, *job.old_moments], job.plan)
        self._combination: Combination | None = None
        self._before, self._total = 0, job.lora.bytes if job.lora else self._windows.bytes[-1]

    def is_intact(self) -> bool:
        """Whether the windows that a killed merge has written are as they were written."""
        state, job = self._state, self._job
        models = [{name: of.get(name, NOTHING) for name in job.plan} for of in self._output.tensors]
        written = Windows(models, job.plan)
        written.plan = self._windows.plan[: state.done]
        digests = [Digest() for _ in models]
        for parts, rows in written.read():
            add_to(digests, parts, rows, self._job.plan)
        due = state.digests[-len(models) :]
        return [digest.state() for digest in digests] == [digest.state() for digest in due]

    def _measure(self) -> Iterator[tuple[Any, list[Any], Summed]]:
        """Yield the base, the inputs and their sum for each part of the parameters, and note digests."""
        plan = {name: form for name, form in self._job.plan.items() if form.kind == "parameter"}
        windows, digests = Windows(self._models, plan), [Digest() for _ in self._sources]
        self._before, self._total = windows.bytes[-1], self._total + windows.bytes[-1]
        for number, (parts, rows) in enumerate(windows.read()):
            self._progress(windows.bytes[number], self._total)
            for j, part in enumerate(parts):
                each = [row[j] for row in rows]
                given, x = self._read(each, plan[part.name], is_stepped=bool(self._base))
                yield x, given, self._sum(part, each, given, x, self._shares, empty(part.stop - part.start))
            add_to(digests, parts, rows, plan)
        self._state.first = [digest.state()[2] for digest in digests]

    @ieee
    def clip(self, limit: float) -> None:
        """Compute the factor that clips each update."""
        squares = np.zeros(len(self._kept))
        for _, _, summed in self._measure():
            squares += summed.squared_norms
        self._state.clips = [min(1.0, limit / norm) if norm else 1.0 for norm in np.sqrt(squares).tolist()]
        self._output.record(self._state, now=True)

    def combine(self, chain: Chain) -> None:
        """Choose the robust combination; a rule that needs distances reads the parameters first."""

        @ieee
        def products() -> F64:
            if self._state.products is None:
                total = GramSum(len(self._kept))
                for x, given, _ in self._measure():
                    total.add(averaging.center_of(given) if x is None else x, given)
                found = total.result()
                if not np.isfinite(found).all():
                    label = self._job.labels[self._kept[int(np.flatnonzero(~np.isfinite(np.diag(found)))[0])]]
                    raise ArrayError(f"{label}: has numbers beyond the range of float32, in which rules compute")
                self._state.products = found.tolist()
                self._output.record(self._state, now=True)
            return np.array(self._state.products)

        self._combination = chain.combination(len(self._kept), products, self._job.round)

    @ieee
    def run(self) -> None:
        """Merge the windows that are not done."""
        state, first = self._state, self._state.done
        for number, (parts, rows) in enumerate(self._windows.read(first), first):
            self._progress(self._before + self._windows.bytes[number], self._total)
            outs = [self._merge_part(part, [each[j] for each in rows]) for j, part in enumerate(parts)]
            add_to([state.digests[i] for i in self._sources], parts, rows[: len(self._sources)], self._job.plan)
            for part, vectors in zip(parts, outs, strict=True):
                self._output.write(part, vectors)
            results = [[*vectors, *[NOTHING] * (1 + self._job.moments - len(vectors))] for vectors in outs]
            add_to(state.digests[-1 - self._job.moments :], parts, list(zip(*results, strict=True)), self._job.plan)
            state.done = number + 1
            self._output.record(state)
        if self._job.lora is not None:
            self._multiply(self._job.lora)
        if state.first is not None:
            names = [[*self._job.paths, self._job.base_path][i] for i in self._sources]
            require_unchanged(names, state.first, [state.digests[i] for i in self._sources])
        self._progress(self._total, self._total)
        self._output.record(state, now=True)

    def _multiply(self, lora: Adapters) -> None:
        """Combine the products of LoRA adapters."""
        state, kept, done = self._state, self._kept, self._windows.bytes[-1]
        for module, names in lora.factors.items():
            self._progress(done, self._total)
            rows, bad = lora.read(module, kept)
            done += sum(bytes_of(vector).size for row in rows for vector in row)
            if bad:
                state.rejected |= bad
                self._output.record(state.restarted(), now=True)
                raise _Restart
            outs, squares = lora.product(module, rows, kept, self._shares)
            state.squares[module] = squares.tolist()
            for i, row in zip((*kept, -1), (*rows, outs), strict=True):
                parts = [Part(name, 0, math.prod(lora.plans[i][name].shape)) for name in names]
                add_to([state.digests[i]], parts, [row], lora.plans[i])
            for part, out in zip(parts, outs, strict=True):
                self._output.write(part, [out])

    def _read(self, rows: list[Any], form: TensorForm, *, is_stepped: bool) -> tuple[list[Any], Any]:
        """Return the inputs of a part in one dtype, and the base in float32 if a step starts from it.

        The dtype is the first model's; with a base it is the common one, or a wider one.
        """
        given = rows[: len(self._kept)]
        kinds = {dtype_name(row) for row in given}
        common = kinds.pop() if len(kinds) == 1 else "float64" if "float64" in kinds else "float32"
        given = [cast(row, common if self._base else form.dtype) for row in given]
        return given, cast(rows[len(given)], "float32") if is_stepped else None

    def _sum(self, part: Part, rows: list[Any], given: list[Any], x: Any, shares: F64, out: Any) -> Summed:
        """Write the average of the inputs, or of their updates from x; start again if an input is not finite."""
        summed = kernels.weighted_sum(given, shares, out, base=x, accumulate="float64", norms=True)
        if not summed.finite.all():
            self._require_finite(part, rows, given, x)
        return summed

    def _merge_part(self, part: Part, rows: list[Any]) -> list[Any]:
        """Return a part of the result, and the same part of each moment."""
        job, state, k, form = self._job, self._state, len(self._kept), self._job.plan[part.name]
        if self._base and part.name not in job.chosen:
            return [row for row in rows[k:] if len(row)]
        if not form.is_averaged:
            names = [*(job.labels[i] for i in self._kept), "base"]
            with_base = k + len(self._base) * (form.kind == "constant")
            why, values = "" if part.name in job.chosen else OUTSIDE, zip(names, rows[:with_base], strict=False)
            return [cast(settled(part.name, form, values, why), form.dtype)]
        given, x = self._read(rows, form, is_stepped=job.is_stepped(form))
        is_mean = x is None and self._combination is None and dtype_name(given[0]) == form.dtype
        n, kind = part.stop - part.start, form.dtype if is_mean else "float32"
        v = over(empty(n * BYTES[kind], np.uint8), kind)
        clips = 1.0 if x is None or state.clips is None else np.array(state.clips)
        summed = self._sum(part, rows, given, x, self._shares * clips, v)
        square = summed.squared_norm_of_sum
        if self._combination is not None:
            averaging.write_combination(self._combination, given, v, x)
            square = float(kernels.squared_norms([v])[0])
        squares = np.array([*summed.squared_norms, square])
        state.squares[part.name] = (squares + state.squares.get(part.name, 0.0)).tolist()
        if x is not None:
            return self._step(part, v, x, rows[len(self._models) :])
        has_rule = self._combination is not None
        return [averaging.require_finite(part.name, cast(v, form.dtype), form.dtype, has_rule=has_rule)]

    def _step(self, part: Part, v: Any, x: Any, moments: Sequence[Any]) -> list[Any]:
        """Return a part of x - gamma u, and the same part of each new moment."""
        job, n, x_out, outs = self._job, len(v), empty(len(v)), tuple[Any, ...]()
        if job.optimizer is None:
            form, u = Linear(A=1), empty(n)
            _, square = kernels.server_step(v, None, x, v_of=form, gamma=job.gamma, v=u, total_out=None, x_out=x_out)
        else:
            if not moments or len(moments[-1]) != n:
                moments = started(job.optimizer, n)
            outs = tuple(empty(n) for _ in moments)
            square = turn(job.optimizer, v, tuple(moments), x, gamma=job.gamma, outs=(x_out, *outs))
        merged = cast(x_out, job.plan[part.name].dtype)
        if not math.isfinite(square) or not is_finite(merged):
            by = "" if job.optimizer is None else f" of {type(job.optimizer).__name__}"
            raise DivergedError(f"{part.name}: the step{by} makes it infinite or NaN; lower the server rate")
        return [merged, *outs]

    def _require_finite(self, part: Part, rows: list[Any], given: list[Any], x: Any) -> None:
        """Start again without an input that is not finite, or if the tensor is a mask."""
        if is_mask(part.name, self._job.pattern[part.name]):
            self._state.constants.append(part.name)
        elif x is not None and not is_finite(x):
            why = why_not_finite(rows[len(given)], "float32", "in which steps compute")
            raise ArrayError(f"base, {part.name}: {why}")
        else:
            kind, sent = self._job.plan[part.name].dtype, zip(self._kept, rows, given, strict=False)
            bad = {str(i): f"{part.name}: {why_not_finite(row, kind)}" for i, row, one in sent if not is_finite(one)}
            if not bad:  # float64 numbers above 1e154
                return
            self._state.rejected |= bad
        self._output.record(self._state.restarted(), now=True)
        raise _Restart

    def report(self) -> dict[str, Any]:
        """Return the content of the report."""
        job, state, kept = self._job, self._state, self._kept
        norms = {name: np.sqrt(squares).tolist() for name, squares in state.squares.items()}
        whole = np.sqrt(np.sum([[0.0] * (len(kept) + 1), *state.squares.values()], axis=0)).tolist()
        by_rule = None if self._combination is None else self._combination.shares(len(kept))
        shares = dict(zip(kept, (self._shares if by_rule is None else by_rule).tolist(), strict=True))
        inputs = []
        for i, path in enumerate(job.paths):
            found = {"path": path, "weight": job.weights[i], "share": shares.get(i, 0.0)}
            if i in shares:
                j = kept.index(i)
                clip = 1.0 if state.clips is None else state.clips[j]
                found |= {"norm": whole[j], "clip_factor": clip, "digest": state.digests[i].state()[0]}
            else:
                found |= {"rejected": state.rejected[str(i)]}
            inputs.append(found)
        base = {"path": job.base_path, "digest": state.digests[len(job.models)].state()[0]}
        return {
            "fedcore": __version__,
            "fingerprint": job.fingerprint,
            "round": job.round,
            "optimizer": _described(job.optimizer),
            "server_lr": job.gamma,
            "clip_norm": job.clip_norm,
            **({} if job.chain is None else {"rule": [_described(one) for one in job.chain]}),
            **({} if by_rule is None else {"chosen": [job.paths[i] for i in kept if shares[i]]}),
            **({} if job.lora is None else job.lora.report()),
            **job.of_fragments(),
            **({"ties": job.ties} if job.ties else {}),
            "inputs": inputs,
            "base": base if self._base else None,
            "digest": state.digests[-1 - job.moments].state()[0],
            "norms_of": "updates" if job.steps else "models",
            "norm": whole[-1],
            "tensors": norms,
        }
