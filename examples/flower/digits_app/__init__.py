"""A Flower app that trains on the digits with fedcore's MimiC; start it with ``flwr run``."""
