"""The digits over Flower, by fedcore's MimiC: what ``flwr run`` starts."""
