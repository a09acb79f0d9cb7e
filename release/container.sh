#!/bin/bash
# Rehearse the second stage of Containerfile without a container runtime: release/container.sh WHEEL
#
# It installs the wheel into Debian's base system (debootstrap) and runs a server there: in a chroot with a read-only
# root, as user 10001, with only /state and /tmp writable. The server is killed and resumed, and the health check runs.
# It needs root, debootstrap, and pip for the wheels of NumPy and prometheus_client.
set -euo pipefail
wheel=$(realpath "$1")
work=$(realpath -m build/container)
root=$work/root
mkdir -p "$work/state/server"
rmdir "$work/state/server" 2>/dev/null || { echo "$work/state: is from an earlier rehearsal; remove it"; exit 1; }

[ -e "$root/usr/bin/pip3" ] || debootstrap --variant=minbase --include=python3,python3-pip bookworm "$root"
mkdir -p "$root/wheels" "$root/state"
cp "$wheel" "$root/wheels"
python3 -m pip download -q --only-binary :all: --python-version 3.11 -d "$root/wheels" "numpy>=1.26" prometheus_client
chroot "$root" pip3 install -q --root-user-action=ignore --break-system-packages --no-index --find-links /wheels \
    "fedcore-fl[prometheus]"
chown 10001:10001 "$work/state"
cat > "$work/state/serve.py" <<'EOF'
import os, sys, time
import numpy as np
import fedcore
from fedcore.callbacks import Prometheus

state = "/state/server"
if os.path.exists(state):
    server = fedcore.Server.load(state, callbacks=[Prometheus()])
else:
    server = fedcore.Server(np.zeros(1000, np.float32), "MIFA", 3, lr=0.1, storage=state, callbacks=[Prometheus()])
print("starts at round", server.round_number, flush=True)
for _ in range(int(sys.argv[1])):
    with server.open_round() as round:
        for client in range(3):
            round.add(client, server.x - np.float32(client), steps=1)
print("ends at round", server.round_number, flush=True)
time.sleep(60)  # until it is killed
EOF

# Everything below runs in its own mount namespace, which ends with it.
unshare --mount bash -euo pipefail <<EOF
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount --bind "$work/state" "$root/state"
mount -t tmpfs tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
run="chroot --userspec=10001:10001 $root env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONDONTWRITEBYTECODE=1"
touch "$root/usr/x" 2>/dev/null && { echo "the root is writable"; exit 1; }
for rounds in 3 2; do
    \$run python3 /state/serve.py \$rounds > "$work/log" & server=\$!
    until grep -q ends "$work/log"; do sleep 0.2; kill -0 \$server; done
    kill -9 \$server; wait \$server || true
    cat "$work/log"
done
\$run fedcore store verify /state/server
\$run fedcore store info /state/server --max-age 600 > /dev/null && echo "healthy"
sleep 2
\$run fedcore store info /state/server --max-age 1 > /dev/null || echo "unhealthy with --max-age 1"
EOF
