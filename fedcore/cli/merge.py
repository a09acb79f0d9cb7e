"""``fedcore merge``: a round of FedAvg over model files."""

import ast
import re
import sys
from dataclasses import fields
from typing import Any

from fedcore.algorithms import optimizers
from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser
from fedcore.errors import ConfigError
from fedcore.model.merging import merge
from fedcore.rules import REGISTRY, Rule, spelled
from fedcore.validation import expand_home, shorten


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("merge", run)
    add, names = parser.add_argument, ", ".join(sorted(name.lower() for name in optimizers.REGISTRY))
    add("out", type=expand_home, metavar="OUT", help="new folder for the result and its report")
    add("inputs", nargs="+", type=expand_home, metavar="MODEL", help="safetensors, .npz or torch file, or a folder")
    add("--weights", type=terminal.numbers, metavar="W,W,...", help="weights, such as numbers of examples")
    add("--base", type=expand_home, metavar="MODEL", help="model from which the others were trained")
    add("--key", metavar="KEY", help="key of the state_dict in torch files, such as model")
    add("--server-optimizer", metavar="NAME", help=f"{names}, or module:Name; needs --base")
    add("--rule", dest="rules", action="append", metavar="NAME", help="robust rule (median, ...); repeatable")
    terminal.add_changes(parser, "option of the rules or the optimizer, such as f=2 or momentum=0.9; repeatable")
    add("--server-lr", type=terminal.amount, metavar="GAMMA", help="server rate; needs --base")
    add("--clip-norm", type=terminal.amount, metavar="C", help="maximum norm of an update; needs --base")
    add("--lora", default="average", metavar="WAY", help="LoRA adapters: average (of A and B), product (B A) or stack")
    add("--rank", type=int, metavar="R", help="rank for --lora product; default: the largest of all")
    add("--only", action="append", metavar="PATTERN", help="merge only such tensors, such as 'layers.0.*'; repeatable")
    add("--ignore", action="append", metavar="PATTERN", help="do not merge such tensors; repeatable")
    terminal.add_json(parser)


def run(options: Options) -> None:
    """Average model files of any size: a round of FedAvg on disk.

    The result is the weighted average of the models, in the dtypes and shards of the base
    or else of the first model. It needs less than 512 MiB of memory. OUT appears by one
    rename when it is complete. If the command is killed, run it again: it continues.
    OUT/merge.json reports weights, digests, norms, and models that were rejected because
    they have a NaN or an infinity.

    Examples:
      fedcore merge merged a.safetensors b.safetensors
      fedcore merge merged a/ b/ c.pt --weights 1200,300,500 --key state_dict

    With --base x, a server optimizer moves x by the averaged updates. Pass the last result
    as the base of the next round; the optimizer continues with its moments. Two rounds of
    DiLoCo (Nesterov momentum 0.9, rate 0.7):
      fedcore merge round1 a1/ b1/ --base start/ --server-optimizer nesterov
      fedcore merge round2 a2/ b2/ --base round1/ --server-optimizer nesterov
    A mean without the two smallest and the two largest values of each coordinate:
      fedcore merge merged a/ b/ c/ d/ e/ --rule trimmed-mean --set f=2
    FedAdam, and updates of norm at most 1:
      fedcore merge out a/ b/ --base x/ --server-optimizer adam --set eta=0.01 --clip-norm 1
    Fragments of a model in turn, each with its own moments (Streaming DiLoCo):
      fedcore merge r1 a1/ b1/ --base r0/ --only 'layers.0.*' --server-optimizer nesterov
    All tensors but the heads, which stay those of x:
      fedcore merge out a/ b/ --base x/ --ignore 'head.*'
    LoRA adapters of any ranks and scales: their products B A, averaged at rank 8, or exactly
    at the sum of the ranks. OUT is a folder that PEFT loads:
      fedcore merge adapter client0/ client1/ --weights 200,100 --lora product --rank 8
      fedcore merge adapter client0/ client1/ --weights 200,100 --lora stack
    """
    terminal.load_imports(())
    options_given = _options(options.changes)
    rules = _rules(options.rules or [], options_given)
    keys = ("weights", "base", "key", "server_lr", "clip_norm", "lora", "rank", "only", "ignore")
    how = {key: getattr(options, key) for key in keys}
    optimizer = _optimizer(options.server_optimizer, options_given)
    with terminal.progress("bytes read") as show:
        report = merge(options.out, options.inputs, optimizer=optimizer, rule=rules or None, progress=show, **how)
    inputs = list(zip(options.inputs, report["inputs"], strict=True))
    for path, one in inputs:
        if "rejected" in one:
            print(f"rejected {path}: {one['rejected']}", file=sys.stderr)
    if options.json:
        terminal.print_json(report)
        return
    kept = [(path, one) for path, one in inputs if "rejected" not in one]
    for path, one in kept:
        norm = float("inf") if one["norm"] is None else one["norm"]
        clipped = f", clipped to {norm * one['clip_factor']:.4g}" if one["clip_factor"] < 1 else ""
        print(f"{one['share']:8.4f}  {path}: norm {norm:.4g}{clipped}")
    for module, one in report.get("products", {}).items():
        print(f"error {one['error']:.2e}, rank {one['rank']} of {one['ranks']}: {module}")
    lora = "" if options.lora == "average" else f", rank {report['rank']}, error {report['error']:.2e}"
    print(f"wrote {options.out}: {len(kept)} of {len(inputs)} models, round {report['round']}{lora}")


def _options(changes: list[str]) -> dict[str, Any]:
    """Return the values of --set."""
    options = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not re.fullmatch(r"\w+", key):
            raise ConfigError(f"--set {change!r}: must be KEY=VALUE, such as momentum=0.9")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ConfigError(f"--set {change!r}: {shorten(value)!r} is not a number") from None
    return options


def _rules(names: list[str], options: dict[str, Any]) -> list[Rule]:
    """Return the rules with their options, and remove these; several rules may have one option in common."""
    kinds: list[Any] = [REGISTRY.find(spelled(name)) for name in names]
    known = [{field.name for field in fields(kind)} for kind in kinds]
    try:
        given = [{key: options[key] for key in own & options.keys()} for own in known]
        rules = [kind(**own) for kind, own in zip(kinds, given, strict=True)]
    except TypeError as error:
        raise ConfigError(f"--rule: {error}; pass the option with --set KEY=VALUE") from None
    for key in set().union(*known) & options.keys():
        del options[key]
    return rules


def _optimizer(name: str | None, options: dict[str, Any]) -> Any:
    """Return the server optimizer with its options, or None."""
    if name is None:
        if options:
            raise ConfigError(f"--set: no rule has the option {next(iter(options))!r}; --server-optimizer is missing")
        return None
    try:
        return optimizers.named(name, **options)
    except TypeError as error:
        raise ConfigError(f"--set: {error}; see the options of {name} in fedcore.algorithms.optimizers") from None
