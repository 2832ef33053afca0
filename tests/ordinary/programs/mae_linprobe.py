# Linear probing of a masked autoencoder's encoder: a norm without parameters, and one layer.
import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from toys import Pictures, VisionTransformer

from egeria_cache import ActivationCache  # +


def adjust_learning_rate(optimizer, epoch, args):
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        done = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
        lr = args.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def train_one_epoch(model, criterion, loader, optimizer, epoch, args):
    model.train(True)
    optimizer.zero_grad()
    for step, (samples, targets) in enumerate(loader):
        if step % args.accum_iter == 0:
            adjust_learning_rate(optimizer, step / len(loader) + epoch, args)
        loss = criterion(model(samples), targets)
        if not math.isfinite(loss.item()):
            raise SystemExit("Loss is not finite")
        (loss / args.accum_iter).backward()
        if (step + 1) % args.accum_iter == 0:
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(loader, model):
    model.eval()
    hits = [(model(images).argmax(1) == target).float().mean() for images, target in loader]
    return torch.stack(hits).mean().item()


def main(args):
    torch.manual_seed(args.seed)
    dataset_train, dataset_val = Pictures(64), Pictures(32, seed=5)
    loader_train = DataLoader(
        dataset_train, sampler=RandomSampler(dataset_train), batch_size=8, drop_last=True
    )
    loader_val = DataLoader(dataset_val, sampler=SequentialSampler(dataset_val), batch_size=8)
    model = VisionTransformer()
    model.head = nn.Sequential(
        nn.BatchNorm1d(model.head.in_features, affine=False, eps=1e-6), model.head
    )
    for p in model.parameters():
        p.requires_grad = False
    for p in model.head.parameters():
        p.requires_grad = True
    optimizer = torch.optim.SGD(model.head.parameters(), lr=args.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    cache = ActivationCache(model, "runs/cache", boundary="auto", loader=loader_train)  # +
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, loader_train, optimizer, epoch, args)
        print(f"epoch {epoch}: accuracy {evaluate(loader_val, model):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("linear probe")
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--warmup_epochs", default=1, type=int)
    parser.add_argument("--accum_iter", default=2, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--seed", default=0, type=int)
    main(parser.parse_args())
