"""A Grid without a network: ClientApps run when they are sent a message, or later, or not at all."""

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


def trains(work):
    """A node whose replies to training messages are ``work(message)``."""
    app = ClientApp()
    app.train()(lambda message, context: work(message))
    return app, {}


class LocalGrid(Grid):
    """``nodes``: {id: (ClientApp, node_config)}. Ids in ``dead`` answer as the real SuperLink does for them, with an
    error of node 1. Ids in ``slow`` answer when they are let ``go``. ``spoil(node, reply)`` may change a reply."""

    run = set_run = create_message = None  # abstract in Grid; no strategy uses them

    def __init__(self, nodes, spoil=None):
        self.nodes, self.dead, self.slow, self.spoil = dict(nodes), set(), set(), spoil
        self.replies, self.waiting, self.sent, self.contexts = {}, {}, [], {}
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            number = f"message {len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            node = message.metadata.dst_node_id
            self.sent.append((message.metadata.message_type, node, number))
            (self.waiting if node in self.slow else self.replies)[number] = self._reply(message, node)
            numbers.append(number)
        return numbers

    def _reply(self, message, node):
        if node in self.dead:
            reply = Message(Error(code=5, reason="Node Unavailable"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1
            return reply
        app, config = self.nodes[node]
        context = self.contexts.setdefault(
            node, Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
        )
        try:
            reply = app(message=message, context=context)
        except Exception as error:
            return Message(Error(code=2, reason=repr(error)), reply_to=message)
        return reply if self.spoil is None else self.spoil(node, reply) or reply

    def go(self, node):
        self.slow.discard(node)
        for _, asked, number in self.sent:
            if asked == node and number in self.waiting:
                self.replies[number] = self.waiting.pop(number)

    def pull_messages(self, message_ids):
        return [self.replies.pop(number) for number in list(message_ids) if number in self.replies]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))
