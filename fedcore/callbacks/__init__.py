"""Rounds told to loggers, monitors and who watches; what each needs is imported when one is made."""

from fedcore.callbacks.callback import Callback
from fedcore.callbacks.mlflow import MLflow
from fedcore.callbacks.progress import Progress
from fedcore.callbacks.prometheus import Prometheus
from fedcore.callbacks.tensorboard import TensorBoard
from fedcore.callbacks.wandb import WandB

__all__ = ["Callback", "MLflow", "Progress", "Prometheus", "TensorBoard", "WandB"]
