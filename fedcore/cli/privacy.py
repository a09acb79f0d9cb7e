"""``fedcore privacy``: the noise of a privacy budget, or the budget of a noise."""

from fedcore.cli import terminal
from fedcore.cli.terminal import Options, Parser
from fedcore.rules.private import PrivateMean, noise_for


def add_arguments(top: Parser) -> None:
    """Add the command."""
    parser = top.add_command("privacy", run)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--epsilon", type=terminal.positive, metavar="E", help="the budget; computes the noise")
    given.add_argument("--noise", type=terminal.positive, metavar="Z", help="the noise multiplier; computes epsilon")
    parser.add_argument("--delta", type=terminal.positive, metavar="D", required=True, help="in (0, 1), such as 1e-6")
    add = parser.add_argument
    add("--rounds", type=terminal.whole_number(1), metavar="R", required=True, help="the number of rounds")
    add("--rate", type=terminal.positive, default=1.0, metavar="Q", help="probability of a client in a round (1)")
    terminal.add_json(parser)


def run(options: Options) -> None:
    """Compute the noise of PrivateMean for a privacy budget, or the budget of a noise.

    The guarantee is for one client: all its data. It holds if each client takes part in
    each round with probability Q, independently of the others, and the cohorts stay secret.
    A delta below 1 / number of clients is usual. The accountant is that of dp_accounting.

    Examples:
      fedcore privacy --epsilon 4 --delta 1e-6 --rounds 1000 --rate 0.01
      fedcore privacy --noise 1.1 --delta 1e-6 --rounds 1000 --rate 0.01
    """
    noise = options.noise
    if noise is None:
        noise = noise_for(options.epsilon, options.delta, rounds=options.rounds, rate=options.rate)
        noise = float(f"{noise * 1.0005:.4g}")  # the printed value must suffice
    epsilon = PrivateMean(1.0, noise, 1.0, options.rate, options.rounds).epsilon(options.delta)
    found = {"noise": noise, "epsilon": epsilon, "delta": options.delta, "rounds": options.rounds, "rate": options.rate}
    if options.json:
        terminal.print_json(found)
        return
    terminal.print_pairs((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in found.items())
    rate = "" if options.rate == 1 else f", rate={options.rate:g}"
    print(f"\nPrivateMean(clip=C, noise={noise:g}, expected=m{rate}, rounds={options.rounds})")
