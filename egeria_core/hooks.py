"""A hook of a module that stays with the model it was made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """Calls a function; a copy of the model gets an inert one, and no copy of the function's owner.

    Args:
        function: Called as the hook is; its answer is not used.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call the function, if there is one."""
        if self._function is not None:
            self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()
