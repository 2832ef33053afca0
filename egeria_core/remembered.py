"""What a small state machine remembers: some of its attributes, and nothing else."""

from __future__ import annotations

from typing import Any, ClassVar


class Remembered:
    """Whose state is the attributes that its class names, of JSON types or of this kind too."""

    remembers: ClassVar[tuple[str, ...]] = ()
    """Names of attributes; their leading underscore is not part of the state."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that later answers depend on."""
        values = {name.lstrip("_"): getattr(self, name) for name in self.remembers}
        return {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in values.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for name in self.remembers:
            value = state[name.lstrip("_")]
            own = getattr(self, name)
            if hasattr(own, "load_state_dict"):
                own.load_state_dict(value)
            else:
                setattr(self, name, value)
