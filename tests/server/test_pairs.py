"""All pairs of two values of the options: a server with them runs rounds like a plain server in memory.

The options and their values come from the declared fields of ``Limits``, ``Storage``, ``Compute``, ``RoundPolicy``,
``Model`` and ``Update``, the arguments of ``Server`` and the registries. A new option is thus drawn without being
listed; one without values is an error that names it. Rows of a greedy covering array combine the values. In each row,
clients are absent, late or send something malformed, and the server is loaded, copied, killed, changed or rolled back.
An error is allowed only if it is a FedcoreError when the server is made.
"""

import copy
import logging
import shutil
from collections.abc import Sequence
from dataclasses import fields
from inspect import Parameter, isclass, isroutine, signature
from itertools import product
from math import nan
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from fedcore import ClientStore, Compute, EdgeAggregator, Limits, Model, RoundPolicy, Server, Storage, Update
from fedcore.algorithms import REGISTRY as METHODS
from fedcore.algorithms import optimizers, rates
from fedcore.errors import CheckpointError, FedcoreError, RangeError
from fedcore.options import CHANGEABLE, CHECKS
from fedcore.rules import NAMED, Combine
from fedcore.rules import REGISTRY as RULES
from fedcore.server.report import Report
from fedcore.store.slots import Codec

CLASSES = {"limits": Limits, "storage": Storage, "compute": Compute, "policy": RoundPolicy}
CLIENTS, ROUNDS, EXTRAS, BIG = 8, 5, 10, 17_000
PLAIN, FOLDER = "default", "a folder"
NUMBERS = {int: (2, 1, 4096), float: (0.5, 1.5, 8.0), bool: (True, False)}
FORMS = ("named", "bytes", "memoryview", "read-only", "float64", "float16", "bfloat16", "int8", "indices")
WEIGHTS = {name: 1.0 + i % 3 for i in range(CLIENTS + 9) for name in (i, f"c{i}")}
OWN = {  # the values of options whose type does not describe them, or with which a round rejects nearly all updates
    "Storage.path": [FOLDER],
    "Storage.folders": [],  # with a path, each shard has a folder
    "Storage.codec": get_args(Codec),
    "Storage.audit_key": [],  # tests/server/test_audit.py has keys, which a load needs again
    "Compute.device": ["cpu"],
    "Compute.shards": [2],
    "Compute.executor": [],  # tests/cluster has shards in other processes
    "Limits.signed_buffers": [(), ("*",)],
    "Limits.max_steps": [4],
    "Limits.max_examples": [30],
    "Limits.max_norm": [8.0, 40.0],
    "RoundPolicy.min_clients": [2],
    "RoundPolicy.buffer": [3, 1],
    "RoundPolicy.deadline": [600.0],
    "Update.client": [],
    "Update.steps": [3],
    "Update.control": [],
    "Update.value": FORMS,
    "Update.round": ["late"],
    "Update.examples": ["none", "some", 0.5],
    "Mean.weights": [WEIGHTS, lambda claims: claims.steps + 1.0],
    "PrivateMean.expected": [4.0],
    "InverseRound.mu": [40.0],
}
WAYS = ("batch", "list", "generator", "pieces", "buffer", "edge")
SAME = "seconds", "bytes", "audited"  # of a report: not compared


class DifferenceError(AssertionError):
    """A difference between the two servers."""


class RefusedError(Exception):
    """The server cannot be made."""


# The options and their values.


def values_of(option, kind):
    """The values of an option of this type; raise LookupError if there are none."""
    origin, arguments = get_origin(kind), get_args(kind)
    if option in OWN:
        return list(OWN[option])
    if kind in NUMBERS:
        return list(NUMBERS[kind])
    if origin is Literal:
        return list(arguments)
    if origin is tuple and set(arguments) <= set(NUMBERS):
        return [tuple(NUMBERS[argument][1] for argument in arguments)]
    if origin is Sequence and arguments[0] in NUMBERS:
        return [(NUMBERS[arguments[0]][0],)]
    found = []
    for part in arguments if origin in (Union, UnionType) else ():
        if part is not NoneType:
            try:
                found += values_of(option, part)
            except LookupError:
                continue
    if not found:
        raise LookupError(f"{option}: add values of this option to OWN")
    return found


def made(make, options):
    """The object, or None if these options are refused."""
    try:
        return make(**options)
    except FedcoreError:
        return None


def instances(registry):
    """Objects of each entry: one with the defaults, and one for each other value of an option."""
    for name in sorted(registry.own):
        make = registry[name]
        hints = get_type_hints(make.__init__ if isclass(make) else make)
        choices = {p: values_of(f"{make.__name__}.{p}", hints[p]) for p in signature(make).parameters}
        needed = [p.name for p in signature(make).parameters.values() if p.default is Parameter.empty]
        needed += ["seed"] if "seed" in choices else []  # so that two servers draw the same noise
        bases = (dict(zip(needed, some, strict=True)) for some in product(*(choices[p] for p in needed)))
        base = next(options for options in bases if made(make, options) is not None)
        yield made(make, base)
        for option in [one for one in choices if one not in needed]:
            others = [made(make, base | {option: value}) for value in choices[option]]
            others = [one for one in others if one not in (None, made(make, base))]
            yield from others if get_origin(hints[option]) is Literal or callable(choices[option][-1]) else others[:1]


def labelled(values):
    return {PLAIN: None} | {
        value if isinstance(value, str) else repr(value).split(" at 0x")[0][:90]: value for value in values
    }


def normal(*shape):
    return np.random.default_rng(9).normal(size=shape).astype(np.float32)


def models():
    """Models; with names, those of ``body.*`` are in a group, and those of ``head.*`` are personal or frozen."""
    named = {"emb": normal(4, 3), "body.w": normal(5, 4), "body.b": normal(7), "head.w": normal(3, 2), "s": normal()}
    buffers = {"body.running_mean": normal(3), "body.running_var": np.abs(normal(3)) + 1}
    steps = {f"body.{i}.num_batches_tracked": np.array(3) for i in range(53)}
    half = {name: tensor.astype(np.float16) for name, tensor in named.items()}
    others = {"mask": np.array([True, False]), "empty": np.zeros((0, 2), np.float32), "wide": normal(3).astype(float)}
    layers = [torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)]
    for layer in (layers[0], layers[2]):
        torch.nn.init.constant_(layer.weight, 0.5)
        torch.nn.init.constant_(layer.bias, 0.25)
    found = {"named": named, "float16": half, "others": named | others, "buffers": named | buffers}
    found |= {"counters": named | steps, "module": torch.nn.Sequential(*layers)}
    found |= {"big": normal(BIG), "big and named": named | {"z": normal(BIG)}}
    for field in [one.name for one in fields(Model) if one.name != "tensors"]:
        patterns = {"A": "body.*"} if field == "partial" else "head.*"
        found[f"Model({field})"] = Model(named | buffers, **{field: patterns})
    return {PLAIN: normal(37)} | found


def columns():
    """The values of each option by label; the first is the default."""
    table = {"event": labelled(EVENTS), "way": labelled(WAYS), "fault": labelled(FAULTS)}
    arguments = {
        "model": models(),
        "algorithm": labelled(instances(METHODS)),
        "clients": {PLAIN: False, "sizes": True},
        "lr": labelled(one.over(lambda t: 4) if hasattr(one, "over") else one for one in instances(rates.REGISTRY)),
        "server_lr": labelled(list(instances(rates.REGISTRY))[:2]),
        "optimizer": labelled(instances(optimizers.REGISTRY)),
        "callbacks": {PLAIN: None},
        "aggregation": labelled([one for one in instances(RULES) if isinstance(one, Combine)] + [*NAMED]),
    }
    for argument in signature(Server).parameters:
        if argument not in CLASSES and argument not in arguments:
            raise LookupError(f"{argument}: add values of this argument of Server to columns")
    table |= arguments | {"first rule": labelled(one for one in instances(RULES) if not isinstance(one, Combine))}
    for kind in (*CLASSES.values(), Update):
        hints = get_type_hints(kind)
        for name in kind._fields if kind is Update else [field.name for field in fields(kind)]:
            option = f"{kind.__name__}.{name}"
            others = [value for value in values_of(option, hints[name]) if kind is Update or is_new(kind, name, value)]
            table[option] = labelled(others)
    return table


def is_new(kind, name, value):
    """Whether a value is valid for the option alone, and is not the default."""
    default = next(field.default for field in fields(kind) if field.name == name)
    return outcome(lambda: CHECKS.get(name, lambda *_: True)(name, value), default) != default


# One pair of servers.


def numbers(update):
    """Malformed numbers of an update, by field."""
    for name, kind in get_type_hints(Update).items():
        if any(part in (int, float) for part in (kind, *get_args(kind))) and name != "client":
            for value in (nan, -1, 10**9, "1"):
                yield f"{name}={value!r}", {name: value}


FAULTS = dict(numbers(Update)) | {
    **{
        f"value {name}": {"value": name}
        for name in ("nan", "inf", "3e38", "shape", "int32", "text", "None", "{}", "-9")
    },
    **{f"control {name}": {"control": name} for name in ("nan", "short", "None")},
    **{name: {"client": name} for name in ("unknown", "twice")},
}
BETWEEN = (
    "load",
    "save",
    "deepcopy",
    "compact",
    "undo",
    "verify",
    "join",
    "leave",
    "sizes",
    "warm",
    "newcomers",
    "replace",
)
DURING = ("crash", "close", "abort")
EVENTS = (*BETWEEN, *DURING, *(f"{how} {option}" for how in ("change", "load") for option in CHANGEABLE))


class Pair:
    """A plain server in memory, and the tested one."""

    def __init__(self, labels, seed, folder, table):
        self.labels, self.folder, self.table, self.copies = labels, folder, table, 0
        self.rng, self.path = np.random.default_rng(seed), folder / "state"
        self.before = self.edge = None
        self.again = {"lr": self["lr"]} if isroutine(self["lr"]) else {}  # code of the caller, which a folder lacks
        ids = [f"c{i}" for i in range(CLIENTS)] if seed[-1] % 2 else list(range(CLIENTS))
        self.new = [f"c{i}" if seed[-1] % 2 else i for i in range(CLIENTS, CLIENTS + 9)]
        self.sized = self["clients"]
        clients = {client: 10 + 7 * (i % 4) for i, client in enumerate(ids)} if self.sized else ids
        try:
            self.plain = self.make(clients, is_plain=True)
        except FedcoreError as error:
            self.plain = error
        try:
            self.tested = self.make(clients, is_plain=False)
            if self["way"] == "edge":
                self.tested.require_partial_sums()
        except FedcoreError as error:
            raise RefusedError(str(error)) from None
        if isinstance(self.plain, FedcoreError):
            raise DifferenceError(f"made: only the plain server is refused: {self.plain}")
        options = {name: self[f"Storage.{name}"] for name in ("path", "durability", "keep_previous", "journal")}
        self.in_folder, self.journal, self.undoable = options["path"], options["journal"], options["keep_previous"]
        # Norms of tensors in slices are summed in another order.
        self.has_bits = self["Compute.shards"] is None or labels["model"] == "big"

    def __getitem__(self, column):
        return self.table[column][self.labels[column]]

    def options(self, kind, *names):
        own = {field.name: f"{kind.__name__}.{field.name}" for field in fields(kind)}
        drawn = {name: column for name, column in own.items() if self.labels[column] != PLAIN}
        found = {name: self[column] for name, column in drawn.items() if not names or name in names}
        return kind(**found | ({"path": self.path} if found.get("path") == FOLDER else {}))

    def make(self, clients, *, is_plain):
        self.chain = chain_of(self["first rule"], self["aggregation"])
        storage, compute = ("codec",) if is_plain else (), ("accumulator", "diagnostics") if is_plain else ()
        options = {"storage": self.options(Storage, *storage), "compute": self.options(Compute, *compute)}
        if is_plain:
            shown = options["compute"]
            options["compute"] = Compute(accumulator=shown.accumulator, diagnostics=shown.diagnostics, batch_size=1)
        for name in ("server_lr", "optimizer"):
            options[name] = self[name]
        lr = 0.1 if self["lr"] is None else self["lr"]
        options |= {"limits": self.options(Limits), "policy": self.options(RoundPolicy), "aggregation": self.chain}
        return Server(self["model"], self["algorithm"] or "FedAvg", clients, lr=lr, **options)

    # Comparisons.

    def same(self, what, a, b, bits=False):
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape:
            if a.tobytes() == b.tobytes():
                return
            close = np.allclose(a.astype(float), b.astype(float), rtol=1e-5, atol=2e-5 * max(1e-2, np.abs(a).max()))
            if close and not (bits and self.has_bits):
                return
        elif isinstance(a, float) and isinstance(b, float):
            if np.isclose(a, b, rtol=1e-4, atol=1e-7, equal_nan=True):
                return
        elif type(a) is type(b) and not isinstance(a, np.ndarray) and a == b:
            return
        raise DifferenceError(f"{what}: expected {a!r:.300}, got {b!r:.300}")

    def compare_reports(self, a, b, *, whole, skipped=SAME):
        for name in [field.name for field in fields(Report) if field.name not in skipped]:
            one, two = getattr(a, name), getattr(b, name)
            if name == "rejected":
                one, two = (sorted(repr(client) for client, _ in pairs) for pairs in (one, two))
            if name in ("rejected", "closed", "missing") and not whole:
                continue
            if name == "groups" and one and two:
                for group in one:
                    self.compare_reports(one[group], two[group], whole=whole, skipped=skipped)
                continue
            self.same(f"report.{name}", one, two, bits=name in ("weights", "ages"))

    def compare(self, tested=None, where="after a round"):
        a, b = self.plain, tested or self.tested
        for what in ("round_number", "x", "client_sizes"):
            self.same(f"{what} {where}", getattr(a, what), getattr(b, what), bits=True)
        self.same(f"clients {where}", list(a.clients), list(b.clients))
        self.same(f"T {where}", a.total(), b.total(), bits=True)
        for client in [*a.clients][:4]:
            self.same(f"row {where}", a.row(client), b.row(client), bits=True)
        counters = [dict(server.counters) for server in (a, b)]
        self.same(f"counters {where}", *({name: one.tolist() for name, one in some.items()} for some in counters))

    # Updates.

    def update(self, client, t, fault):
        """Return the update of a client in float32, and how it is sent."""
        layout, rng, method = self.plain.layout, self.rng, self.plain.algorithm
        sent = {name: self[f"Update.{name}"] for name in Update._fields if self.labels[f"Update.{name}"] != PLAIN}
        form, is_late = sent.pop("value", "flat"), sent.pop("round", None) == "late" and rng.random() < 0.5
        kind, p = sent.get("kind", "model"), layout.n_parameters
        value = (rng.integers(-40, 41, p if kind == "gradient" else layout.n) / 16).astype(np.float32)
        value[p:] = np.abs(value[p:])
        if form == "indices":
            value[rng.random(len(value)) < 0.5] = 0
        control = (rng.integers(-9, 10, p) / 16).astype(np.float32) if method.second_vector else None
        claims = {"steps": int(rng.integers(1, 1 + min(5, method.most_steps or 5))), "control": control, "loss": 1.5}
        claims |= {"examples": int(rng.integers(1, 40)), "kind": kind} | sent
        if claims["examples"] in ("none", "some"):
            claims["examples"] = None if claims["examples"] == "none" or rng.random() < 0.5 else 7
        if self.plain.policy.buffer is not None or is_late:
            claims["round"] = max(0, t - int(rng.integers(0, 3))) if is_late else t
        claims |= {name: bad for name, bad in fault.items() if name not in ("value", "control", "client")}
        own = None
        if layout.groups and kind != "gradient" and rng.random() < 0.7:
            own = {name for names in list(layout.groups.values())[:1] for name in names}
        outside = {} if kind == "gradient" else self.outside(kind)
        value, control = spoilt(fault.get("value"), value), spoilt(fault.get("control"), control)
        claims["control"] = control
        if not isinstance(value, np.ndarray) or value.dtype != np.float32 or "shape" in fault.values():
            return Update(client, value, **claims), "flat", None
        named = {s.name: value[s.start : s.stop].reshape(s.shape) for s in layout.slices if s.stop <= len(value)}
        named = {name: tensor for name, tensor in (named | outside).items() if own is None or name in own}
        may_name = form == "named" and kind != "gradient" and len(layout.slices) > 1
        has_names = outside or own is not None or (may_name and rng.random() < 0.7)
        return Update(client, named if has_names else value, **claims), form, named

    def outside(self, kind):
        now, counted = self.plain.counters, {piece.name for piece in self.plain.layout.counters}
        grown = int(self.rng.integers(0, 4))
        if kind == "delta":
            return {name: np.full_like(one, grown if name in counted else 0) for name, one in now.items()}
        return {name: (one + grown).astype(one.dtype) if name in counted else one.copy() for name, one in now.items()}

    def deliver(self, opened, updates, way):
        """Add the updates to a round of the tested server."""
        if way == "batch":
            opened.add_batch([in_form(update, form) for update, form, _ in updates])
            return []
        return [self.deliver_one(opened, *one, way) for one in updates]

    def deliver_one(self, opened, update, form, named, way):
        plain = isinstance(update.value, np.ndarray) and named is not None and update.value.dtype == np.float32
        try:
            if way == "pieces" and named is not None and update.client in opened._clients:
                claims = {n: v for n, v in update._asdict().items() if n not in ("client", "value", "control", "keep")}
                incoming = outcome(lambda: opened.begin(update.client, **claims))
                if isinstance(incoming, RangeError):
                    return None  # listed as rejected, as by ``add``
                for name, part in [*named.items(), *([] if update.control is None else [("control", update.control)])]:
                    write_piece(incoming, name, part, "flat" if (form, update.kind) == ("indices", "model") else form)
                incoming.done()
            elif way == "buffer" and plain and len(update.value) == self.plain.layout.n:
                y = opened.buffer()
                y[:] = update.value
                opened.add_batch([update._replace(value=y)])
            else:
                opened.add_batch([in_form(update, form)])
        except FedcoreError as error:
            return type(error).__name__
        return None

    # Rounds.

    def run(self):
        event = self.labels["event"]
        for t in range(ROUNDS):
            if event not in (PLAIN, *DURING) and t in (0, 3):
                self.between(event)
            copied = copy.deepcopy(self.plain) if event == "undo" else None
            self.round(event if event in DURING and t in (1, 3) else None, event == "newcomers" and t == 2)
            self.before = copied if copied is not None and self.plain.round_number > copied.round_number else None
            self.compare()
        if self.in_folder:
            self.between("load")

    def round(self, event, has_newcomers):
        t, fault = self.plain.round_number, self["fault"] and FAULTS[self["fault"]]
        ids = list(self.plain.clients)
        cohort = [ids[i] for i in self.rng.permutation(len(ids))[: int(self.rng.integers(1, len(ids) + 1))]]
        a, b = (server.broadcast(cohort) for server in (self.plain, self.tested))
        self.same("broadcast.x", np.asarray(a.x), np.asarray(b.x), bits=True)
        newcomers = [self.new.pop()] if has_newcomers else []
        updates = []
        for i, client in enumerate([*cohort, *newcomers]):
            own = fault if fault and i % 3 == 0 else {}
            updates.append(self.update("nobody" if own.get("client") == "unknown" else client, t, own))
            if own.get("client") == "twice":
                updates.append(self.update(client, t, {}))
        newcomers = dict.fromkeys(newcomers, 9) if self.sized else newcomers
        if self.plain.policy.buffer is not None:
            return self.push(updates)
        opened = self.plain.open_round(newcomers=newcomers)
        errors = [self.deliver_one(opened, update, "flat", None, "add") for update, _, _ in updates]
        if event == "abort":
            opened.abort()
            other = self.tested.open_round(newcomers=newcomers)
            self.deliver(other, updates, "add")
            return other.abort()
        due = outcome(opened.finish)
        opened.abort()
        way = self["way"] or "add"
        if newcomers or event or any(errors) or (way == "pieces" and fault):
            way = "add"
        if way in ("list", "generator"):
            sent = [in_form(update, form) for update, form, _ in updates]
            got = outcome(lambda: self.tested.round(sent if way == "list" else iter(sent)))
        elif way == "edge" and not (set(EVENTS) & {self.labels["event"]}) - {"verify", "compact"}:
            got = outcome(lambda: self.by_edge(updates, cohort))
        else:
            other, cut = self.tested.open_round(newcomers=newcomers), len(updates) // 2
            if event in ("crash", "close") and self.in_folder:
                self.deliver(other, updates[:cut], way)
                self.reload(is_killed=event == "crash")
                other = self.tested.open_round(newcomers=newcomers)
                self.deliver(other, updates[cut:] if self.journal else updates, way)
            elif (found := self.deliver(other, updates, way)) not in (errors, []):
                raise DifferenceError(f"errors of add: expected {errors}, got {found}")
            got = outcome(other.finish)
            other.abort()
        if isinstance(due, Report) and isinstance(got, Report):
            skipped = (*SAME, "factors") if way == "edge" else SAME  # the edge has scaled its updates
            return self.compare_reports(due, got, whole=event is None and way != "edge", skipped=skipped)
        if type(due) is not type(got):
            raise DifferenceError(f"finish: expected {due!r:.200}, got {got!r:.200}")
        if self.journal:
            self.tested.open_round().abort()
        return None

    def by_edge(self, updates, cohort):
        with self.tested.open_round() as opened:
            settings, sizes = self.tested.settings, {c: 10 + 7 * (int(str(c).strip("c")) % 4) for c in opened._clients}
            options = {name: getattr(settings, name) for name in ("lr", "server_lr", "limits")}
            clients = sizes if self.sized else list(sizes)
            options["aggregation"] = self.chain
            self.edge = self.edge or EdgeAggregator(self["model"], settings.algorithm, clients, **options)
            at_edge = [one for one in updates if one[0].round is None and one[0].weight is None]
            with self.edge.open_round(self.tested.broadcast(cohort).x, round=opened._number) as own:
                self.deliver(own, at_edge, "add")
                opened.add_partial_sum(own.partial_sum().to_bytes(), "edge", clients=self.edge.clients)
            self.deliver(opened, [one for one in updates if not any(one is other for other in at_edge)], "add")
        return opened.report

    def push(self, updates):
        due, got, lists = [], [], [[]]
        for update, form, _ in updates:
            reports = outcome(lambda u=update: self.plain.push([u]), None)
            due += reports if isinstance(reports, list) else []
            if isinstance(reports, list) and len(lists[-1]) < 3:
                lists[-1].append(in_form(update, form))
            else:  # an error of the caller, which ends its list
                lists += [[in_form(update, form)], []]
        for sent in lists:
            reports = outcome(lambda s=sent: self.tested.push(s), None)
            got += reports if isinstance(reports, list) else []
        self.same("reports of push", len(due), len(got))
        for one, two in zip(due, got, strict=True):
            self.compare_reports(one, two, whole=True)
        if not self.journal or self.labels["event"] != "crash":
            for server in (self.plain, self.tested):
                server.open_buffer().abort()

    # Events.

    def between(self, event):
        how, _, option = event.partition(" ")
        if how == "load":
            change = self.changed(option) if option else {}
            trial = copy.deepcopy(self.plain) if change and self.plain.policy.buffer is None else None
            refused = trial is None or isinstance(outcome(lambda: trial.change(**change)), Exception)
            if refused or trial.settings == self.plain.settings:
                change = {}
            if self.reload(**change):
                self.plain.change(**change)
        elif how == "change":
            change = self.changed(option)
            if self.both(lambda server: server.change(**change)):
                self.note(change)
        elif event == "save":
            self.tested.save(path := self.copy())
            with Server.load(path, **self.options_of_load()) as other:
                self.compare(other, "after a copy")
        elif event == "deepcopy" and not self.in_folder and not self.tested.settings.layout.groups:
            if (self["Compute.shards"] or 1) == 1:
                self.tested = copy.deepcopy(self.tested)
        elif event == "compact":
            self.tested.compact(erase=bool(self.in_folder))
        elif event == "undo" and self.undoable and self.before is not None:
            self.tested.close()
            with ClientStore.open(self.path, keep_previous=True) as store:
                store.undo()
            self.plain = self.before
            self.reload()
        elif event == "verify":
            self.same("verify", [], self.tested.verify())
        elif event == "join":
            new = self.new.pop()
            self.both(lambda server: server.add_clients({new: 9} if self.sized else [new]))
        elif event == "leave":
            gone = list(self.plain.clients)[1]
            self.both(lambda server: server.remove_client(gone, erase=server is self.tested and bool(self.in_folder)))
        elif event == "sizes" and self.sized:
            self.both(lambda server: server.update_clients({next(iter(server.clients)): 50}))
        elif event == "warm" and self.plain.round_number == 0:
            g = np.full(self.plain.layout.n_parameters, 0.25, np.float32)
            self.both(lambda server: server.warm_start(dict.fromkeys([*server.clients][:2], g)))
        elif event == "replace":
            x = self.plain.x * np.float32(0.5)
            self.both(lambda server: server.replace_x(x))
        self.compare(where=f"after {event}")

    def both(self, change):
        """Apply a change to both servers; return whether they accept it."""
        a, b = (outcome(lambda s=server: change(s)) for server in (self.plain, self.tested))
        if isinstance(a, Exception) != isinstance(b, Exception) and b is not False:
            raise DifferenceError(f"change: expected {a!r:.200}, got {b!r:.200}")
        return not isinstance(a, Exception)

    def changed(self, option):
        """Return another value of an option of ``change``."""
        pick = lambda column: self.table[column][str(self.rng.choice(list(self.table[column])))]  # noqa: E731
        if option in CLASSES:
            kind = CLASSES[option]
            name = str(self.rng.choice([field.name for field in fields(kind)]))
            if option == "policy" and name in ("buffer", "min_clients"):
                name = "max_staleness"
            value = pick(f"{kind.__name__}.{name}")
            return {option: kind() if value is None else kind(**{name: value})}
        if option == "aggregation":
            return {option: chain_of(pick("first rule"), pick("aggregation"))}
        return {option: pick(option) or 0.2 + 0.01 * self.plain.round_number}

    def copy(self):
        self.copies += 1
        return self.folder / f"copy{self.copies}"

    def options_of_load(self):
        names = ("resident", "journal", "durability") if self.in_folder else ()
        return self.again | {
            "storage": self.options(Storage, *names) if names else None,
            "aggregation": self.chain if any(getattr(rule, "weights", None) for rule in self.chain) else None,
        }

    def reload(self, *, is_killed=False, **change):
        """Load the tested server from its folder, or from a copy of it; return whether it has the changes."""
        if not self.in_folder:
            self.tested.save(path := self.copy())
        elif is_killed:
            shutil.copytree(self.path, path := self.copy())
        else:
            path = self.path
        self.tested.close()
        self.path = path if self.in_folder else self.path
        try:
            self.tested = Server.load(path, **self.options_of_load() | change)
        except (RangeError, CheckpointError):  # an option cannot be changed
            if not change:
                raise
            self.tested = Server.load(path, **self.options_of_load())
            return False
        self.note(change)
        return bool(change)

    def note(self, change):
        self.chain = change.get("aggregation", self.chain)
        self.again = {name: value for name, value in (self.again | change).items() if isroutine(value)}

    def close(self):
        for server in (self.plain, getattr(self, "tested", None)):
            if isinstance(server, Server):
                server.close()


def chain_of(first, last):
    return [*([] if first is None else [first]), *(NAMED[last] if isinstance(last, str) else [last] if last else [])]


def outcome(call, instead=None):
    """Return the result of a call, or its FedcoreError, or ``instead`` of it."""
    try:
        return call()
    except FedcoreError as error:
        return error if instead is None else instead


def spoilt(fault, value):
    """Return a vector with a fault."""
    if fault is None or value is None:
        return value
    others = {"int32": np.zeros(len(value), np.int32), "text": "model", "None": None, "{}": {}}
    others |= {"shape": np.zeros(len(value) + 1, np.float32), "short": value[:-1]}
    if fault in others:
        return others[fault]
    value[-1 if fault == "-9" else 0] = float(fault)
    return value


def in_form(update, form):
    """Return the update with its flat vector, or its named tensors, in another form."""
    value = update.value
    if isinstance(value, dict) and form in ("float64", "float16"):
        value = {name: one.astype(form) if one.dtype == np.float32 else one for name, one in value.items()}
    if not isinstance(value, np.ndarray) or value.dtype != np.float32:
        return update._replace(value=value)
    if form == "read-only":
        value = value.copy()
        value.flags.writeable = False
    change = {"bytes": value.tobytes(), "memoryview": memoryview(value)}
    if form in ("float64", "float16"):
        with np.errstate(over="ignore"):
            value = value.astype(form)
    if form == "bfloat16":
        value = torch.from_numpy(value.copy()).to(torch.bfloat16)
    return update._replace(value=change.get(form, value))


def write_piece(incoming, name, part, form):
    flat = part.reshape(-1)
    if name == "control" or part.dtype != np.float32 or not len(flat):
        incoming.write(name, part)
    elif form == "int8":
        incoming.write(name, (flat * 16).astype(np.int8), scales=np.float32([1 / 16]))
    elif form == "indices":
        at = np.flatnonzero(flat)
        incoming.write(name, flat[at], at=at)
    else:
        cut = len(flat) // 2
        flat = flat.astype(form) if form in ("float64", "float16") else flat
        incoming.write(name, flat[cut:], start=cut)
        incoming.write(name, flat[:cut])


# The covering array.


def attempt(labels, seed, folder, table, *, runs=True):
    """Make the servers of a row, and run them; return "ok", "refused", or the fault."""
    folder.mkdir()
    pair = None
    try:
        pair = Pair(labels, seed, folder, table)
        if runs:
            pair.run()
    except RefusedError:
        return "refused"
    except Exception as error:
        return error
    finally:
        if pair is not None:
            pair.close()
        shutil.rmtree(folder)
    return "ok"


CONTEXTS = [
    {},
    {"Storage.path": FOLDER},
    {"Compute.accumulator": "exact", "clients": "sizes"},
    {"Storage.path": FOLDER, "Compute.shards": "2", "model": "big"},
    {"aggregation": "Median()", "Limits.max_norm": "8.0", "clients": "sizes"},
]


class Covering:
    """Rows that cover all pairs of two values which are no defaults, each with some further values."""

    def __init__(self, table, seed):
        self.table, self.rng = table, np.random.default_rng(seed)
        self.values = [(column, label) for column, labels in table.items() for label in labels if label != PLAIN]
        columns = np.unique([column for column, _ in self.values], return_inverse=True)[1]
        self.columns, self.left = columns, columns[:, None] != columns[None, :]
        self.refused = np.zeros_like(self.left)

    def row(self, pair):
        """Return the pair and values of other columns that cover most further pairs."""
        chosen = list(pair)
        for column in self.rng.permutation(self.columns.max() + 1):
            gains = self.left[:, chosen].sum(axis=1) + self.rng.random(len(self.values)) / 2
            gains[(self.columns != column) | self.refused[:, chosen].any(axis=1)] = 0
            if column not in self.columns[chosen] and gains.max() >= 1 and len(chosen) < 2 + EXTRAS:
                chosen.append(int(gains.argmax()))
        return chosen

    def run(self, most, attempt_row):
        """Attempt rows until all pairs are covered, or refused; return the faulty rows and their numbers."""
        number, faults, plain = 0, [], dict.fromkeys(self.table, PLAIN)
        while number < most and len(left := np.argwhere(self.left)):
            pair = left[self.rng.integers(len(left))].tolist()
            options = [dict([self.values[i]]) for i in self.row(pair)]
            rows = (plain | context | options[0] | options[1] for context in CONTEXTS)
            labels = next((row for row in rows if attempt_row(row, number, runs=False) != "refused"), None)
            if labels is None:
                self.left[np.ix_(pair, pair)], self.refused[np.ix_(pair, pair)] = False, True
                continue
            for option in options[2:]:
                if plain.items() & {(column, labels[column]) for column in option}:
                    more = labels | option
                    labels = more if attempt_row(more, number, runs=False) != "refused" else labels
            covered = [i for i, (column, label) in enumerate(self.values) if labels[column] == label]
            self.left[np.ix_(covered, covered)] = False
            if (result := attempt_row(labels, number)) != "ok":
                faults.append((labels, number, result))
            number += 1
        return faults


@pytest.mark.parametrize(
    ("seed", "most"), [(1, 120), *(pytest.param(seed, 10**6, marks=pytest.mark.endurance) for seed in range(2, 5))]
)
def test_each_pair_of_options_runs_like_a_plain_server_or_is_refused_when_it_is_made(seed, most, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "fedcore")
    table = columns()

    def attempt_row(labels, number, **options):
        return attempt(labels, [seed, number], tmp_path / "row", table, **options)

    faults = Covering(table, seed).run(most, attempt_row)
    lines = [
        f"row {n}, {[pair for pair in row.items() if pair[1] != PLAIN]}: {fault!r:.500}" for row, n, fault in faults
    ]
    assert not lines, "\n".join(lines[:20])
