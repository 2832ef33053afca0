"""`EgeriaCallback`: a cache, and perhaps a freeze controller, under Lightning's Trainer.

    cache = ActivationCache(module, "runs/cache")
    trainer = Trainer(callbacks=[EgeriaCallback(cache, boundary="backbone")])

The hooks in the order in which the Trainer calls them are the order of the methods below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from egeria_cache.cache import ActivationCache

    Callback = object
else:
    from lightning.pytorch import Callback

__all__ = ["EgeriaCallback"]


class EgeriaCallback(Callback):
    """Runs a cache, and perhaps a controller, along with Lightning's Trainer.

    Sets the boundary when all other callbacks have frozen what they freeze, steps the controller
    after each optimizer step, logs, and keeps the controller's state in checkpoints (the loader's
    own is kept by Lightning). In the processes that `ddp_fork` and `ddp_spawn` start it opens the
    cache, and closes it there. The cache of the main process is left to whoever made it.

    Args:
        cache: Of the LightningModule, or of a part of it; under ddp with a controller, of the
            LightningModule itself.
        controller: A freeze controller (`egeria_core.FreezeController`), or what makes one from
            (model, optimizer, cache): `partial(FreezeController, total_steps=10_000)`.
        boundary: Where to cut from the start of `fit` on, as the cache's model names it. Not
            together with a controller, which decides that.

    Raises:
        ValueError: Both a controller and a boundary were given.
    """

    def __init__(
        self, cache: ActivationCache, controller: Any = None, *, boundary: str | None = None
    ) -> None:
        if controller is not None and boundary is not None:
            raise ValueError(f"the controller sets the boundary; leave out boundary={boundary!r}")
        self.cache = cache
        self.controller: Any = None
        """The controller at work, from the start of `fit` on."""
        self._given = controller
        self._boundary = boundary
        self._opened_here = False
        self._loaded: dict[str, Any] | None = None
        self._last_step = 0
        self._loss: Tensor | float | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the cache, where this is a process that the Trainer has started."""
        self._opened_here = self.cache.reopen() or self._opened_here

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember a checkpoint's state until there is a controller."""
        self._loaded = state_dict

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let a loader that had given out its epoch begin the next one.

        Lightning never asks for the batch after the last, so the loader's state says that nothing
        is left of its epoch; resuming there would be an epoch without a batch.
        """
        fit = checkpoint.get("loops", {}).get("fit_loop", {})
        if fit.get("epoch_loop.batch_progress", {}).get("is_last_batch"):
            for state in fit.get("state_dict", {}).get("combined_loader", ()):
                if "yielded" in state:  # one of ours
                    state["finished"] = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the controller, or set the boundary."""
        if self._boundary is not None:
            self.cache.set_boundary(self._boundary)
        if self._given is not None and self.controller is None:
            is_made = hasattr(self._given, "step") and not isinstance(self._given, type)
            self.controller = self._given if is_made else self._made(trainer)
        state, self._loaded = self._loaded, None
        if state is not None and state["controller"] is not None and self.controller is not None:
            self.controller.load_state_dict(state["controller"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note how many steps a resumed run has behind it, and let its loaders go on there."""
        self._last_step, self._loss = trainer.global_step, None
        fit = trainer.fit_loop
        # Lightning passes the loaders' states on in mid-epoch only. At an epoch's end they hold the
        # number of the epoch, its augmented version and the sampler's random numbers.
        states = getattr(fit, "_combined_loader_states_to_load", None)
        if states:
            fit._combined_loader._load_state_dicts(states)
            fit._combined_loader_states_to_load = []
            iter(fit._data_fetcher)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Step the controller, if this batch ended an optimizer step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Lightning has divided each by the number of batches that are accumulated.
            loss = loss.detach()
            self._loss = loss if self._loss is None else self._loss + loss
        if trainer.global_step == self._last_step:
            return
        loss, self._loss, self._last_step = self._loss, None, trainer.global_step
        if self.controller is not None:
            self.controller.step(loss)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log."""
        self._log(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state, for the checkpoint."""
        return {"controller": None if self.controller is None else self.controller.state_dict()}

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close what was made here."""
        if self.controller is not None and self.controller is not self._given:
            self.controller.close()
            self.controller = None
        if self._opened_here:
            self.cache.close()

    def _made(self, trainer: Any) -> Any:
        """Return a controller of the model: wrapped, where its ranks have to decide together."""
        wrapped, cached, optimizers = trainer.strategy.model, self.cache.model, trainer.optimizers
        is_ddp = isinstance(wrapped, DistributedDataParallel)
        if is_ddp and wrapped.module is not cached:
            raise ValueError(
                "under ddp a controller freezes on all ranks together, so it needs the whole "
                f"LightningModule: make the cache of {type(wrapped.module).__name__} instead of "
                f"{type(cached).__name__}, a part of it"
            )
        if len(optimizers) != 1:
            raise ValueError(
                f"a controller follows one optimizer, and there are {len(optimizers)}; make it "
                "yourself, and give it to EgeriaCallback ready-made"
            )
        return self._given(wrapped if is_ddp else cached, optimizers[0], self.cache)

    def _log(self, trainer: Any) -> None:
        stats = self.cache.stats()
        names = [name for name, _ in self.cache.model.named_modules()]
        figures = {
            "egeria/hits": stats.hits,
            "egeria/hit_rate": stats.hit_rate,
            "egeria/saved_s": stats.saved_s,
            # Loggers take numbers: the boundary's place among the modules, 0 for none.
            "egeria/boundary": names.index(stats.boundary) if stats.boundary in names else 0,
        }
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)
