"""The paper's seven models at their real size, in plain PyTorch, with random weights."""

from models.bert import Bert
from models.deeplab import DeepLab
from models.mobilenet import MobileNetV2
from models.resnet import CifarResNet, ResNet50
from models.staged import Staged
from models.transformer import Transformer

__all__ = ["Bert", "CifarResNet", "DeepLab", "MobileNetV2", "ResNet50", "Staged", "Transformer"]
