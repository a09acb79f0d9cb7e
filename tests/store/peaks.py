"""The memory that a call allocates."""

import tracemalloc


def peak_of(call):
    """Bytes allocated at once in the least of some calls: others enlarge what they add to."""
    peaks = []
    for _ in range(4):
        tracemalloc.start()
        try:
            call()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)
