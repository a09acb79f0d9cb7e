"""The time at which a departed device should leave the objective, and a newcomer's boost helps: Ruan et al. 2021.

"Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Sec. 4.2 and 4.3, eq. 7 to 9. D, V, g, L,
mu and W are constants of bounds: nobody observes them, so they are the caller's to estimate or to choose.
"""

import math

from fedcore.arguments import real
from fedcore.arrays import ieee


@ieee
def kept_bound(t: float, *, t0: float, E: int, D: float, V: float, g: float) -> float:
    """f_0(t) = ((t - t0) D + V) / (t E + g): the bound in round t if the device's data stay in the objective.

    Args:
        t: a round from t0 on.
        t0: the round of the departure, counted from 1.
        E: the local steps of a complete round.
        D: what each round without the device adds: the part of the bound that the missing gradients leave.
        V, g: the constants of the bound V / (t E + g) that holds while everybody is there.
    """
    return ((t - t0) * D + V) / (t * E + g)


@ieee
def excluded_bound(
    t: float, *, t0: float, E: int, V: float, g: float, gap: float, V_after: float | None = None
) -> float:
    """f_1(t) = V' / ((t - t0) E + g), V' = V / (t0 E + g) + gap: the bound in round t if the device was excluded in t0.

    Args:
        t: a round from t0 on.
        t0, E, V, g: as for ``kept_bound``.
        gap: Gamma_l = F_l(x*) - F_l*, how much the departed device's data differ from the others'.
        V_after: V' itself, where the one above will not do. With g (V / (t0 E + g) + gap) the bound starts in t0 where
            f_0 is there, raised by the gap; as printed that holds for g = 1 alone.
    """
    after = V / (t0 * E + g) + gap if V_after is None else V_after
    return after / ((t - t0) * E + g)


@ieee
def should_exclude(
    T: float, *, t0: float, E: int, D: float, V: float, g: float, gap: float, V_after: float | None = None
) -> bool:
    """Tell whether a device that departs in round t0 of T should go (eq. 8): min over t >= t0 of f_0(t) >= f_1(T).

    f_0 is monotone: it rises from f_0(t0) = V / (t0 E + g) if D (t0 E + g) >= V E, and else falls towards D / E, which
    it does not reach.

    Args:
        T: the last round.
        t0, E, D, V, g, gap, V_after: as for ``kept_bound`` and ``excluded_bound``.

    Raises:
        RangeError: a number is outside its range: t0 >= 1, T >= t0, E >= 1, V, g and V_after > 0, D >= 0, gap >= 0.

    Reference: Ruan et al. 2021, Sec. 4.3, eq. 8.

    >>> [should_exclude(T, t0=20, E=5, D=2.0, V=30.0, g=1.0, gap=9.0) for T in (26, 27)]
    [False, True]
    """
    real("t0", t0, "[1, inf)")
    real("E", E, "[1, inf)")
    real("T", T, f"[{t0}, inf)")
    real("D", D, "[0, inf)")
    real("gap", gap, "[0, inf)")
    real("V", V, "(0, inf)")
    real("g", g, "(0, inf)")
    if V_after is not None:
        real("V_after", V_after, "(0, inf)")
    least = min(kept_bound(t0, t0=t0, E=E, D=D, V=V, g=g), D / E)
    return least >= excluded_bound(T, t0=t0, E=E, V=V, g=g, gap=gap, V_after=V_after)


@ieee
def should_exclude_by_rate(T: float, *, t0: float, gap: float, c: float = 1.0) -> bool:
    """The rule's order of magnitude, with the constants in one: T - t0 >= c sqrt(gap t0).

    Args:
        T, t0, gap: as for ``should_exclude``.
        c: the constant that the paper's O() hides.

    Raises:
        RangeError: a number is outside its range; c > 0.

    Reference: Ruan et al. 2021, eq. 9.

    >>> [should_exclude_by_rate(T, t0=25, gap=4.0) for T in (34, 35)]
    [False, True]
    """
    real("t0", t0, "[1, inf)")
    real("T", T, f"[{t0}, inf)")
    real("gap", gap, "[0, inf)")
    real("c", c, "(0, inf)")
    return T - t0 >= c * math.sqrt(gap * t0)


@ieee
def reboot_helps_within(*, shift: float, share: float, gap: float, L: float, mu: float, W: float) -> float:
    """The distance |x - x*| below which boosting a newcomer's share (the fast reboot) helps (eq. 7).

    shift / ((2 sqrt(2 L) / mu share sqrt(gap) + 1) share W).

    Args:
        shift: F~(x*) - F~(x~*), what the old optimum loses under the new objective.
        share: p~_l = n_l / (n + n_l), the newcomer's in the new objective.
        gap: Gamma_l, as for ``excluded_bound``.
        L, mu: smoothness and strong convexity.
        W: a bound on the lengths of the gradient and the Hessian of F.

    Raises:
        RangeError: a number is outside its range: share in (0, 1], L, mu and W > 0, shift and gap >= 0.

    Reference: Ruan et al. 2021, Sec. 4.2, eq. 7.
    """
    real("shift", shift, "[0, inf)")
    real("gap", gap, "[0, inf)")
    real("share", share, "(0, 1]")
    real("L", L, "(0, inf)")
    real("mu", mu, "(0, inf)")
    real("W", W, "(0, inf)")
    return shift / ((2 * math.sqrt(2 * L) / mu * share * math.sqrt(gap) + 1) * share * W)


@ieee
def distance_by_gradient(length: float, *, L: float, mu: float) -> tuple[float, float]:
    """The least and the most that |x - x*| can be, by the length of the gradient at x: |grad F| / L and |grad F| / mu.

    The distance that ``reboot_helps_within`` is compared with: nobody observes it, and the paper estimates it by the
    gradient. The boost helps where the larger of the two is below that, as far as eq. 7 and its constants hold.

    Args:
        length: |grad F(x)|; where lr is small, about |x - x_next| / gamma of a round of all the old devices with a
            server_lr, and |x - x_next| / (eta K) of one that averages models.
        L, mu: smoothness and strong convexity, mu <= L.

    Raises:
        RangeError: a number is outside its range: length >= 0, L > 0, mu in (0, L].

    >>> distance_by_gradient(3.0, L=6.0, mu=1.5)
    (0.5, 2.0)
    """
    length, L = real("length", length, "[0, inf)"), real("L", L, "(0, inf)")
    return length / L, length / real("mu", mu, f"(0, {L}]")
