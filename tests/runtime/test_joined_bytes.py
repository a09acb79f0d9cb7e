import numpy as np
import pytest

from fedcore.arrays import core
from fedcore.errors import ArrayError


@pytest.mark.parametrize(
    "sizes", [[], [(0, 0)], [(3, 0), (0, 5)], [(7, 1), (64, 3 << 20), (1, (256 << 10) + 1)], [(61, 17 << 20), (9, 70)]]
)
def test_each_head_is_joined_to_its_payload(sizes):
    random = np.random.default_rng(0)
    heads, payloads = [], []
    for head, payload in sizes:
        heads.append(random.bytes(head))
        payloads.append(random.integers(0, 256, payload, np.uint8))
    made = core.joined_bytes(heads, payloads)
    assert made == [h + p.tobytes() for h, p in zip(heads, payloads, strict=True)]
    assert all(type(one) is bytes for one in made)


def test_objects_without_bytes_are_rejected():
    with pytest.raises(ArrayError, match="payloads"):
        core.joined_bytes([b""], [3])
