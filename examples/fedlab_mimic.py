"""MimiC in FedLab's StandalonePipeline with its trainers: ten clients, three in each round."""

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.core.standalone import StandalonePipeline

from fedcore.adapters.fedlab import ServerHandler


class Data:
    def get_dataloader(self, client, batch_size):
        inputs = torch.randn(32, 5, generator=torch.Generator().manual_seed(client))
        return torch.utils.data.DataLoader(list(zip(inputs, (inputs[:, 0] > 0).long(), strict=True)), batch_size)


class Pipeline(StandalonePipeline):
    def evaluate(self):
        pass


net = torch.nn.Linear(5, 2)
handler = ServerHandler(net, global_round=30, sample_ratio=0.3, algorithm="MimiC", lr=0.1, steps=4)
trainer = SGDSerialClientTrainer(net, num_clients=10)
trainer.setup_dataset(Data())
trainer.setup_optim(epochs=1, batch_size=8, lr=0.1)
Pipeline(handler, trainer).main()
print(len(handler.reports), "rounds, accepted in the last one:", handler.reports[-1].accepted)
