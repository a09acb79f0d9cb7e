"""The script of an NVFlare site: the example's, which sleeps with a task while the file hold-SITE-ROUND exists.

Its arguments: the number of sites, the folder of the files, and the example.
"""

import runpy
import sys
import time
from pathlib import Path

import nvflare.client as flare

receive_task = flare.receive


def receive():
    received = receive_task()
    while received and (Path(sys.argv[2]) / f"hold-{flare.get_site_name()}-{received.current_round}").exists():
        time.sleep(0.1)
    return received


if __name__ == "__main__":
    flare.receive = receive
    runpy.run_path(sys.argv[3])
