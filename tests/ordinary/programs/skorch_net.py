# skorch: a net with frozen features, trained like an estimator.
import numpy as np
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import EpochScoring, Freezer
from toys import Pictures, resnet
from torch import nn

from egeria_cache import ActivationCache, EgeriaLoader  # +

torch.manual_seed(0)
data = Pictures(48)
X = data.data.numpy().astype(np.float32)
y = np.array(data.targets, dtype=np.int64)


class Classifier(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        net = resnet()
        self.features = nn.Sequential(*list(net.children())[:-1])
        self.head = nn.Linear(net.fc.in_features, num_classes)

    def forward(self, X):
        return self.head(self.features(X).flatten(1))


module = Classifier()
module.features.requires_grad_(False)
cache = ActivationCache(module, "runs/cache", boundary="auto")  # +
net = NeuralNetClassifier(
    module,
    criterion=nn.CrossEntropyLoss,
    max_epochs=3,
    lr=0.05,
    batch_size=8,
    train_split=None,
    iterator_train__shuffle=True,
    iterator_train=EgeriaLoader, iterator_train__cache=cache,  # +
    verbose=0,
)  # fmt: skip
net.fit(X, y)
print(f"{net.history[-1, 'train_loss']:.4f}", net.predict(X[:4]).shape)
