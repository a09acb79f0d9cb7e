"""The model as clients get it: a difference is measured from what was sent, not from what the server keeps."""

from fedcore.kernels import dequantise, quantise
from fedcore.layout import Layout
from fedcore.libraries import NARROW
from fedcore.memory import copied
from fedcore.typing import F32


def as_sent(layout: Layout, x: F32) -> F32:
    """x, float32[n], rounded to the model's dtypes, ties to even; itself where all are float32.

    Cost: nothing, or reads 4 n bytes and writes 4 n.
    """
    if not layout.narrow:
        return x
    sent = copied(x)
    for piece in layout.narrow:
        part = sent[piece.start : piece.stop]
        dequantise(quantise(part, NARROW[piece.dtype]), out=part)
    sent.flags.writeable = False
    return sent
