"""The paper's seven models at their real size, in plain PyTorch, with random weights."""

from .bert import Bert
from .deeplab import DeepLab
from .mobilenet import MobileNetV2
from .resnet import CifarResNet, ResNet50
from .staged import Staged
from .transformer import Transformer

__all__ = ["Bert", "CifarResNet", "DeepLab", "MobileNetV2", "ResNet50", "Staged", "Transformer"]
