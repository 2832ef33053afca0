# ignite: a supervised trainer, an evaluator, and a checkpoint handler.
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from toys import Pictures, resnet
from torch import nn
from torch.utils.data import DataLoader

from egeria_cache import ActivationCache  # +


def run(epochs=3, lr=0.05):
    torch.manual_seed(2)
    train_loader = DataLoader(Pictures(48), batch_size=8, shuffle=True)
    val_loader = DataLoader(Pictures(16, seed=8), batch_size=8)
    model = resnet()
    for name, p in model.named_parameters():
        p.requires_grad = name.startswith("fc")
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=lr, momentum=0.5)
    criterion = nn.CrossEntropyLoss()
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=train_loader)  # +
    trainer = create_supervised_trainer(model, optimizer, criterion)
    metrics = {"accuracy": Accuracy(), "loss": Loss(criterion)}
    evaluator = create_supervised_evaluator(model, metrics=metrics)

    @trainer.on(Events.EPOCH_COMPLETED)
    def log_validation_results(engine):
        evaluator.run(val_loader)
        print(f"epoch {engine.state.epoch}: {evaluator.state.metrics['accuracy']:.2f}")

    trainer.run(train_loader, max_epochs=epochs)


if __name__ == "__main__":
    run()
