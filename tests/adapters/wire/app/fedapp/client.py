"""Trains on the node's digits; waits while a file exists, so that the test can kill a process in a round."""

import time
from pathlib import Path

from flwr.clientapp import ClientApp

from fedapp.task import STEPS, load_part, train_locally
from fedcore.adapters.flower import Task, secure_mod


def masks(message, context, call_next):
    """Mask the updates of a secure strategy."""
    is_secure = context.run_config["method"].startswith("Secure")
    return secure_mod(min_clients=3)(message, context, call_next) if is_secure else call_next(message, context)


app = ClientApp(mods=[masks])


@app.train()
def work(message, context):
    task, client = Task.of(message), int(context.node_config["partition-id"])
    out = Path(context.run_config["out"])
    (out / f"node-{context.node_id}").write_text(str(client))
    (out / f"at-work-{client}-{task.round}").touch()
    while (out / f"hold-{client}-{task.round}").exists():
        time.sleep(0.1)
    examples, labels = load_part(out, client)
    how = {"lr": task.lr, "a": task.a, "offset": task.offset}
    y = train_locally(task.tensors, examples, labels, round=task.round, client=client, **how)
    return task.reply(y, steps=STEPS, examples=len(labels))
