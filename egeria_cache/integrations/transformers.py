"""Hugging Face's Trainer: `EgeriaTrainer`, which is Trainer with a cache.

Trainer makes and prepares its loaders as ever, and the cache takes its place inside them. The
position in an epoch is Trainer's own affair (`resume_from_checkpoint`); a checkpoint holds besides
which augmented version of the samples comes next, and what the controller knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from egeria_cache.cache import ActivationCache
from egeria_cache.integrations.accelerate import attach_prepared

__all__ = ["EgeriaTrainer", "EgeriaTrainerMixin"]


class EgeriaTrainerMixin:
    """Mixed in before a Trainer of any kind: `class Mine(EgeriaTrainerMixin, SFTTrainer)`.

    Args:
        args: Trainer's.
        cache: The `ActivationCache` of the model that is given to Trainer. None trains without.
        controller: A freeze controller (`egeria_core.FreezeController`), which is given the loss
            of every optimizer step. Or what makes one of the model and the optimizer, once Trainer
            has made that: `partial(FreezeController, cache=cache)`.
        more: Trainer's.
    """

    args: Any
    model: Any

    def __init__(
        self, *args: Any, cache: ActivationCache | None = None, controller: Any = None, **more: Any
    ) -> None:
        self.cache = cache
        self.controller: Any = controller if hasattr(controller, "step") else None
        self._make_controller: Any = None if self.controller is not None else controller
        self._train_loader: Any = None
        self._step_loss: Any = 0.0
        self._logged_boundary: str | None = None
        super().__init__(*args, **more)
        self.add_callback(_Tells(self))  # type: ignore[attr-defined]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, and then the controller."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self._make_controller is not None:
            make, self._make_controller = self._make_controller, None
            self.controller = make(self.model, optimizer)
        return optimizer

    def get_train_dataloader(self) -> Any:
        """Return Trainer's loader, served from the cache."""
        self._train_loader = self._cached(super().get_train_dataloader(), "train")  # type: ignore[misc]
        return self._train_loader

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> Any:
        """Return Trainer's loader, served from the cache."""
        prepared = super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        name = f"eval-{eval_dataset}" if isinstance(eval_dataset, str) else "eval"
        return self._cached(prepared, name)

    def get_test_dataloader(self, test_dataset: Dataset[Any]) -> Any:
        """Return Trainer's loader, served from the cache."""
        return self._cached(super().get_test_dataloader(test_dataset), "test")  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on one batch; the loss of an optimizer step is the sum over its batches."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._step_loss = self._step_loss + loss.detach()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what the cache did, too."""
        if self.cache is not None:
            stats = self.cache.stats()
            logs = {**logs, "egeria_hits": stats.hits, "egeria_saved_s": round(stats.saved_s, 3)}
            if stats.boundary != self._logged_boundary:
                self._logged_boundary = stats.boundary
                logs["egeria_boundary"] = str(stats.boundary)  # type: ignore[assignment]
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        path = None if checkpoint is None else self._state_path(Path(checkpoint))
        if path is not None and path.exists():
            state = torch.load(path, map_location="cpu", weights_only=False)
            loader: Any = getattr(self._train_loader, "base_dataloader", None)
            if hasattr(loader, "_take_draws") and state["loader"] is not None:
                loader._take_draws(state["loader"])
            if self.controller is not None and state["controller"] is not None:
                self.controller.load_state_dict(state["controller"])

    def _state_path(self, checkpoint: Path) -> Path:
        return checkpoint / f"egeria_{self.args.process_index}.pt"

    def _cached(self, prepared: Any, name: str) -> Any:
        if self.cache is not None:
            attach_prepared(prepared, self.cache, name=name)
        return prepared


class EgeriaTrainer(EgeriaTrainerMixin, Trainer):
    """Trainer with a cache.

    trainer = EgeriaTrainer(model=model, args=args, train_dataset=data, cache=cache)
    """


class _Tells(TrainerCallback):
    """Tells the mixin when a step or a checkpoint was made."""

    def __init__(self, trainer: EgeriaTrainerMixin) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer.controller is not None:
            self._trainer.controller.step(self._trainer._step_loss)
        self._trainer._step_loss = 0.0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = self._trainer
        folder = Path(trainer._get_output_dir(trial=None), f"checkpoint-{state.global_step}")
        if folder.is_dir() and not args.save_only_model:
            loader: Any = getattr(trainer._train_loader, "base_dataloader", None)
            controller = trainer.controller
            state = {
                "loader": loader.state_dict() if hasattr(loader, "_take_draws") else None,
                "controller": None if controller is None else controller.state_dict(),
            }
            torch.save(state, trainer._state_path(folder))
