"""A user's subclass of fedcore's handler: the server's rows beside the models, and which code fedcore refuses."""

import numpy as np
import pytest

pytest.importorskip("fedlab")

from fedcore import Server, errors
from tests.adapters.extensions import fedlab
from tests.adapters.extensions.fedlab import CLIENTS, LR, Trainer, handler, run


class Noted(Trainer):
    """Notes from which model each client trained, and its upload."""

    rounds = ()

    def local_process(self, payload, id_list):
        super().local_process(payload, id_list)
        uploads = {client: upload[0].numpy() for client, upload in zip(id_list, self.cache, strict=True)}
        Noted.rounds += ((payload[0].numpy().copy(), uploads),)


NAMES = "ChangedModel ChangedParameters GlobalUpdate Sampling Filtered OwnLoad ReadsBuffer Downlink ChangedDownlink"


@pytest.mark.parametrize("name", NAMES.split())
def test_rows_are_of_the_clients_that_trained_and_of_the_model_that_they_got(name):
    made, Noted.rounds = handler("ours", getattr(fedlab, name), "MIFA"), ()
    run("ours", made=made, trainer=Noted)
    server = Server(Noted.rounds[0][0], "MIFA", CLIENTS, lr=LR)
    for report, (x, uploads) in zip(made.reports, Noted.rounds, strict=True):
        assert set(report.accepted) == set(uploads)
        if not np.array_equal(server.x, x):
            server.replace_x(x)
        with server.open_round() as opened:
            for client, y in uploads.items():
                opened.add(client, y, steps=1)
    for client in server.clients:
        np.testing.assert_allclose(made.server.store.read(client), server.store.read(client), rtol=1e-5, atol=1e-6)


def test_a_changed_model_of_the_last_round_is_the_server_s_too():
    made = handler("ours", fedlab.ChangedModel)
    model, _ = run("ours", made=made)
    np.testing.assert_array_equal(made.server.x, model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("OwnSum", r"^global_update: .* did not call super\(\).global_update .*, so FedAvg took no step"),
        ("BothBuffer", "^global_update: it is unknown whose the uploads are"),
        ("Nobody", "^round 0: no client takes part, since sample_clients returned none"),
    ],
)
def test_an_override_that_would_lose_a_round_is_an_error_in_it(name, reason):
    made = handler("ours", getattr(fedlab, name))
    with pytest.raises(errors.RoundError, match=reason):
        run("ours", made=made)
    assert made.reports == []
