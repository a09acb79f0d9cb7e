from bench.peers.torchvision_ops import declare

declare()
