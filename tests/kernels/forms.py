"""The forms of rows and sums that are tried: MimiC's, SCAFFOLD's, FedStale's, and whatever a table may say."""

from fedcore.kernels import Terms

FORMS = {
    "replaced": dict(row=Terms(h=1), adds=Terms(row=1, r=-1, q=1)),
    "control": dict(row=Terms(h=1, r=1, q=1), adds=Terms(row=1, r=-1)),
    "stale": dict(row=Terms(h=1), adds=Terms(row=1, r=-0.3)),
    "general": dict(row=Terms(h=0.7, r=0.25, q=-2), adds=Terms(row=0.75, r=-0.5, h=0.3, q=1.25)),
}
