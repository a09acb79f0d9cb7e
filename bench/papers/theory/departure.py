"""The error bound, when to exclude a departed device, and where boosting a new device helps: Ruan et al. 2021.

Source: "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Theorem 3.1, Sec. 4.2 and 4.3, eq.
7 to 9. M, D, V, g, L, mu and W are unobservable constants of bounds; the caller estimates or chooses them. Our copy of
the text lacks the definitions of M, D and V.
"""

import math

from fedcore.arrays import ieee
from fedcore.validation import check_number


@ieee
def error_bound(t: float, *, M: float, E: int, D: float, V: float, g: float) -> float:
    """Return (M D + V) / (t E + g), the bound of E |x_t - x*|^2 with ``InverseRound.of_theorem`` (Theorem 3.1).

    Args:
        t: the number of rounds.
        M: M_t, which grows with the rounds for schemes A and B.
        E: the local steps of a complete round.
        D, V: the constants of the bound. By round 0, V is at least g |x_0 - x*|^2.
        g: gamma of the rate.
    """
    return (M * D + V) / (t * E + g)


@ieee
def kept_bound(t: float, *, t0: float, E: int, D: float, V: float, g: float) -> float:
    """Return f_0(t) = ((t - t0) D + V) / (t E + g), the bound in round t if the device's data stay in the objective.

    This is ``error_bound`` with M = t - t0.

    Args:
        t: a round, at least t0.
        t0: the round of the departure, counted from 1.
        E: the local steps of a complete round.
        D: the part of the bound that each round without the device's gradients adds.
        V, g: the constants of the bound V / (t E + g) before the departure.
    """
    return error_bound(t, M=t - t0, E=E, D=D, V=V, g=g)


@ieee
def excluded_bound(
    t: float, *, t0: float, E: int, V: float, g: float, gap: float, V_after: float | None = None
) -> float:
    """Return f_1(t) = V' / ((t - t0) E + g), V' = V / (t0 E + g) + gap, the bound if the device was excluded in t0.

    Args:
        t: a round, at least t0.
        t0, E, V, g: as for ``kept_bound``.
        gap: Gamma_l = F_l(x*) - F_l*, the difference between the departed device's data and the other data.
        V_after: V'. Default: the formula above. With g (V / (t0 E + g) + gap) the bound starts in t0 at f_0 plus the
            gap; the printed formula has this property only for g = 1.
    """
    after = V / (t0 * E + g) + gap if V_after is None else V_after
    return after / ((t - t0) * E + g)


@ieee
def should_exclude(
    T: float, *, t0: float, E: int, D: float, V: float, g: float, gap: float, V_after: float | None = None
) -> bool:
    """Whether to exclude a device that departs in round t0 of T (eq. 8): min over t >= t0 of f_0(t) >= f_1(T).

    f_0 is monotone. It rises from f_0(t0) = V / (t0 E + g) if D (t0 E + g) >= V E, and otherwise falls towards D / E
    without reaching it.

    Args:
        T: the last round.
        t0, E, D, V, g, gap, V_after: as for ``kept_bound`` and ``excluded_bound``.

    Raises:
        RangeError: a number is outside its range: t0 >= 1, T >= t0, E >= 1, V, g and V_after > 0, D >= 0, gap >= 0.

    Reference: Ruan et al. 2021, Sec. 4.3, eq. 8.

    >>> [should_exclude(T, t0=20, E=5, D=2.0, V=30.0, g=1.0, gap=9.0) for T in (26, 27)]
    [False, True]
    """
    check_number("t0", t0, "[1, inf)")
    check_number("E", E, "[1, inf)")
    check_number("T", T, f"[{t0}, inf)")
    check_number("D", D, "[0, inf)")
    check_number("gap", gap, "[0, inf)")
    check_number("V", V, "(0, inf)")
    check_number("g", g, "(0, inf)")
    if V_after is not None:
        check_number("V_after", V_after, "(0, inf)")
    least = min(kept_bound(t0, t0=t0, E=E, D=D, V=V, g=g), D / E)
    return least >= excluded_bound(T, t0=t0, E=E, V=V, g=g, gap=gap, V_after=V_after)


@ieee
def should_exclude_by_rate(T: float, *, t0: float, gap: float, c: float = 1.0) -> bool:
    """Whether T - t0 >= c sqrt(gap t0), the rule of ``should_exclude`` in order of magnitude with one constant.

    Args:
        T, t0, gap: as for ``should_exclude``.
        c: the constant that the paper's O() hides.

    Raises:
        RangeError: a number is outside its range, such as c > 0.

    Reference: Ruan et al. 2021, eq. 9.

    >>> [should_exclude_by_rate(T, t0=25, gap=4.0) for T in (34, 35)]
    [False, True]
    """
    check_number("t0", t0, "[1, inf)")
    check_number("T", T, f"[{t0}, inf)")
    check_number("gap", gap, "[0, inf)")
    check_number("c", c, "(0, inf)")
    return T - t0 >= c * math.sqrt(gap * t0)


@ieee
def optimum_shift(*, share: float, gap: float, L: float, mu: float) -> float:
    """Return 2 sqrt(2 L) / mu share sqrt(gap), a bound of the distance between the optima before and after an arrival.

    The bound has a factor of 2 to spare: mu |x* - x~*| <= share |grad F_l(x*)| <= share sqrt(2 L gap).

    Args:
        share, gap, L, mu: as for ``reboot_helps_within``.

    Raises:
        RangeError: a number is outside its range.

    Reference: Ruan et al. 2021, a part of eq. 7.

    >>> optimum_shift(share=0.25, gap=9.0, L=2.0, mu=0.5)
    6.0
    """
    check_number("gap", gap, "[0, inf)")
    check_number("share", share, "(0, 1]")
    check_number("L", L, "(0, inf)")
    check_number("mu", mu, "(0, inf)")
    return 2 * math.sqrt(2 * L) / mu * share * math.sqrt(gap)


@ieee
def reboot_helps_within(*, shift: float, share: float, gap: float, L: float, mu: float, W: float) -> float:
    """Return the distance |x - x*| below which boosting a new device's share (the fast reboot) helps (eq. 7).

    The distance is shift / ((2 sqrt(2 L) / mu share sqrt(gap) + 1) share W).

    Args:
        shift: F~(x*) - F~(x~*), the excess loss of the old optimum in the new objective.
        share: p~_l = n_l / (n + n_l), the new device's share of the new objective.
        gap: Gamma_l, as for ``excluded_bound``.
        L, mu: the constants of smoothness and strong convexity.
        W: a bound on the norms of the gradient and the Hessian of F.

    Raises:
        RangeError: a number is outside its range: share in (0, 1], L, mu and W > 0, shift and gap >= 0.

    Reference: Ruan et al. 2021, Sec. 4.2, eq. 7.
    """
    check_number("shift", shift, "[0, inf)")
    check_number("W", W, "(0, inf)")
    return shift / ((optimum_shift(share=share, gap=gap, L=L, mu=mu) + 1) * share * W)


@ieee
def distance_by_gradient(length: float, *, L: float, mu: float) -> tuple[float, float]:
    """Return bounds of |x - x*| from the norm of the gradient at x: |grad F| / L and |grad F| / mu.

    The distance cannot be observed, and the paper estimates it from the gradient. If eq. 7 and its constants hold, the
    boost helps when the larger bound is below ``reboot_helps_within``.

    Args:
        length: |grad F(x)|. A round of all old devices with a small lr estimates it: |x - x_next| / gamma with a
            server_lr, |x - x_next| / (eta K) if models are averaged.
        L, mu: the constants of smoothness and strong convexity, mu <= L.

    Raises:
        RangeError: a number is outside its range: length >= 0, L > 0, mu in (0, L].

    >>> distance_by_gradient(3.0, L=6.0, mu=1.5)
    (0.5, 2.0)
    """
    length, L = check_number("length", length, "[0, inf)"), check_number("L", L, "(0, inf)")
    return length / L, length / check_number("mu", mu, f"(0, {L}]")
