"""Masked sums in Flower: strategies whose server cannot read a single update, and the mod of their ClientApps."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from logging import ERROR
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcore import algorithms
from fedcore.adapters.flower.grid import Request, StreamingGrid, answers, by_id
from fedcore.adapters.flower.metrics import Collected, only_record, records_of
from fedcore.adapters.flower.records import CONTROL, EXAMPLES, METHOD, Wire, read_vector
from fedcore.adapters.flower.strategy import ServerStrategy, log_failures
from fedcore.adapters.session import SECURE, SUM, require_known
from fedcore.arrays import F32
from fedcore.errors import ArrayError, RangeError, RoundError
from fedcore.model import Layout
from fedcore.secure import Encoding, SecureClient, SecureServer
from fedcore.secure.primitives import digest_of
from fedcore.validation import as_integer


def _content(message: bytes) -> RecordDict:
    return RecordDict({SECURE: ConfigRecord({"message": message})})


def _message_in(content: RecordDict) -> Any:
    return records_of(content, ConfigRecord).get(SECURE, ConfigRecord()).get("message", b"")


def _sent(content: RecordDict, arrays: str) -> tuple[Layout, F32, str]:
    """Return the layout and x of the model in a message, and the digest of all records, by which a node trains."""
    tensors = Wire.of(content.array_records[arrays]).read(content.array_records[arrays])
    records = {
        name: {key: [one.dtype, one.shape, one.stype, one.data] for key, one in record.items()}
        if isinstance(record, ArrayRecord)
        else dict(record)
        for name, record in content.items()
    }
    layout = Layout.of(tensors)
    return layout, layout.flatten(tensors), digest_of(records)


class SecureStrategy(ServerStrategy):
    """A strategy that adds up masked updates: the server learns their sum, and no single update, size or metric.

    Each ClientApp needs ``secure_mod``. A round exchanges keys and encrypted shares with the chosen nodes, then trains,
    and then opens the sum: four messages for each node, or five with identities. A node that fails or times out drops
    out; each phase may take the ``timeout`` of ``start``.

    All nodes sign or mask for the same model and the same records beside it, so a subclass must not change single
    messages. If too few nodes are left, or a node lies, the sum is lost: the model stays, and the nodes train again in
    the next round. A node that broke the protocol is left out from then on (``SecureServer.named``). After
    ``abort_after`` lost rounds in a row, no further round begins, and the run ends with an error.

    ``Report.norms``, ``weights`` and ``steps`` are the cohort's, in equal parts. Training metrics are not sent.
    Evaluation is not masked.

    Subclasses name a method: ``class Mine(SecureStrategy, method=algorithms.FedProx)``.

    Args:
        identities: the public key of each node, by node id, if the mods have an ``identity``; see ``SecureServer``.
        colluding: with ``PrivateMean``, as for ``Encoding.of``.
        options: as for ``ServerStrategy``. Needed are ``limits=Limits(max_norm=, max_examples=)`` or ``PrivateMean``,
            ``compute=Compute(accumulator="exact")``, and as ``policy.min_clients`` the smallest number of clients
            whose sum the server may learn.

    Raises:
        RangeError: as for ``Encoding.of``, in the first round.
    """

    def __init__(self, *, identities: Mapping[int, bytes] | None = None, colluding: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self._identities, self._colluding = identities, colluding
        self._secure: SecureServer | None = None
        self._named: set[int] = set()  # the nodes that are left out

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Run the first two phases, and return the messages of the third, with the server's model.

        Raises:
            RoundError: the sums of the last ``abort_after`` rounds were lost; the message has the reasons.
        """
        self._rejected_rounds.check()
        self._grid, self._secure, self.failures = grid, None, []
        return super().configure_train(server_round, arrays, config, grid)

    def _connected(self, grid: Grid) -> list[int]:
        return [node for node in super()._connected(grid) if node not in self._named]

    def _messages(self, chosen: Mapping[int, int], config: ConfigRecord) -> Iterator[Message]:
        if any(draws > 1 for draws in chosen.values()):
            raise RangeError("choose: a node occurs twice, which masked sums do not support")
        if isinstance(self._grid, StreamingGrid):  # the first phases wait for all nodes
            self._grid.await_also(())
            self._grid.close_when(lambda: False)
        nodes, fewest = [*chosen], max(2, self._policy.min_clients)
        if len(nodes) < fewest:
            self._stay(None, RoundError(f"nodes: {len(nodes)} can take part, but the sum needs {fewest}"))
            return iter(())
        content = next(super()._contents(nodes, config))[1]  # equal for all nodes
        x, work = _sent(content, self.arrayrecord_key)[1:]
        encoding = Encoding.of(self.server, clients=len(nodes), colluding=self._colluding, x=x, work=work)
        secure = SecureServer(nodes, encoding, min_clients=fewest, identities=self._identities)
        try:
            for _ in ("keys", "shares"):
                self._exchange(secure)
                secure.close_phase()
        except RoundError as error:
            self._stay(secure, error)
            return iter(())
        self._secure = secure
        left = {int(node): 1 for node in secure.messages}
        return self._with_inboxes(super()._messages(left, config), secure.messages)

    def _with_inboxes(self, messages: Iterable[Message], inboxes: Mapping[Any, bytes]) -> Iterator[Message]:
        for message in messages:
            message.content = RecordDict({**message.content, **_content(inboxes[message.metadata.dst_node_id])})
            yield message

    def _exchange(self, secure: SecureServer) -> None:
        """Send the messages of the open phase, and read the answers that arrive before the timeout."""
        requests: list[Request] = []

        def messages() -> Iterator[Message]:
            for node, data in secure.messages.items():
                message = Message(_content(data), int(node), "train")
                requests.append(Request(message.metadata, int(node)))
                yield message

        replies = self._grid.send_and_receive(messages(), timeout=self._timeout)
        self._receive(secure, replies, by_id(requests))

    def _receive(self, secure: SecureServer, replies: Iterable[Message], pending: dict[str, Request]) -> None:
        for request, reply, failure in answers(replies, pending):
            if failure:
                self.failures.append(failure)
            elif request is not None:
                secure.receive(request.node, _message_in(reply.content))
            del reply

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the masked replies, open their sum, and take the server step."""
        secure, pending = self._secure, by_id(self._asked)
        self._asked, self._secure, self._chosen = [], None, None
        if secure is None:
            return (None, None) if self.fraction_train == 0.0 else (self._write_model(), None)
        try:
            self._receive(secure, replies, pending)
            secure.close_phase()
            while secure.messages:
                self._exchange(secure)
                secure.close_phase()
            self.server.add_clients([node for node in secure.survivors if node not in self.server.clients])
            part = secure.partial_sum(self.server)
        except (RoundError, RangeError) as error:
            self._stay(secure, error)
            return self._write_model(), None
        with self.server.open_round() as round:
            round.add_partial_sum(part, SUM)
        assert round.report is not None
        return self._after(round.report, [], Collected())

    def _stay(self, secure: SecureServer | None, error: Exception) -> None:
        log(ERROR, "masked sum: the model stays: %s", error)
        log_failures(self.failures)
        named = () if secure is None else secure.named
        if named:
            log(ERROR, "masked sum: nodes that broke the protocol are left out from now on: %s", named)
        self._named |= {int(node) for node in named}
        self._rejected_rounds.count((), [*(() if secure is None else secure.rejected), (SUM, f"{error}")])


class SecureFedAvg(SecureStrategy, method=algorithms.FedAvg):
    """``fedcore.algorithms.FedAvg`` over masked sums."""


class SecureFedNova(SecureStrategy, method=algorithms.FedNova):
    """``fedcore.algorithms.FedNova`` without momentum over masked sums."""


def secure_mod(
    *, steps: int | str | None = None, weighted_by_key: str = EXAMPLES, arrays: str = "arrays", **options: Any
) -> Callable[[Message, Context, Callable[[Message, Context], Message]], Message]:
    """Return the mod that masks the training replies of a ClientApp: ``ClientApp(mods=[secure_mod()])``.

    Place it first: mods after it, such as ``LocalDpMod``, then change the update before it is masked. The node refuses
    to train without masks, so that no server gets its plain update.

    Args:
        steps: the number of local steps, or the name of its metric, for replies without ``Task.reply``. Default: 1,
            where models are averaged.
        weighted_by_key: the metric with the number of examples, an integer.
        arrays: the strategy's ``arrayrecord_key``.
        options: those of ``SecureClient``: ``min_clients``, ``identity``, ``peers``, ``noise`` and ``max_norm``.
    """
    own = [name for name in signature(secure_mod).parameters if name != "options"]
    require_known("secure_mod", options, [*own, *signature(SecureClient).parameters])
    SecureClient(**options)  # raises an error now if an option is wrong

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        data = _message_in(message.content)
        if not data:
            raise ArrayError("message: the server asks for an update without masks; use a SecureStrategy")
        states = context.state.config_records
        client = SecureClient(**options)
        if not SecureClient.opens(data) and SECURE in states:
            client = SecureClient.from_state(json.loads(str(states[SECURE]["state"])))
        words = None
        if SecureClient.needs_words(data):
            del message.content[SECURE]
            layout, x, work = _sent(message.content, arrays)
            reply = call_next(message, context)
            if reply.has_error():
                return reply
            words = _encoded(client, layout, x, reply.content, work)
        answer = client.answer(data, words, form=Encoding)
        states[SECURE] = ConfigRecord({"state": json.dumps(client.to_state())})
        return Message(_content(answer), reply_to=message)

    def _encoded(client: SecureClient, layout: Layout, x: F32, content: RecordDict, work: str) -> Any:
        records = records_of(content, ArrayRecord)
        models = [record for name, record in records.items() if name != CONTROL]
        if len(models) != 1 or client.encoding is None:
            raise ArrayError(f"arrays: the reply has {len(models)} model records; it must have exactly one")
        metrics, done = only_record(content), records_of(content, ConfigRecord).get(METHOD, ConfigRecord())
        own: Any = metrics.get(steps) if isinstance(steps, str) else steps
        count: Any = done.get("steps", 1 if own is None and client.encoding.eta is None else own)
        examples: Any = metrics.get(weighted_by_key)
        y = layout.flatten(Wire.of(models[0]).read(models[0]))
        change = read_vector(CONTROL, records[CONTROL]) if CONTROL in records else None
        numbers: dict[str, Any] = {"steps": as_integer(count), "examples": as_integer(examples)}
        return client.encoding.encode(x, y, **numbers, change=change, work=work)

    return mod
