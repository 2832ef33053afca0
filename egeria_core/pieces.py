"""What belongs to each layer, cut into pieces that are read one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from egeria_core.prefix import LayerMap

__all__ = ["Piece", "layer_parameters", "pieces_of"]


@dataclass(slots=True)
class Piece:
    """Parameters of one layer that are copied together."""

    layer: int
    parameters: list[Tensor] = field(default_factory=list)


def layer_parameters(model: nn.Module, layers: LayerMap) -> list[list[Tensor]]:
    """Return the parameters that freeze with each layer and not with the one before.

    Those in front of a boundary that no module of a layer owns (a class token) belong to the
    first boundary that they feed; the last layer has all that is in front of no boundary. A tied
    tensor belongs to the first that has it.
    """
    seen: set[int] = set()

    def new(parameters: Iterable[Tensor]) -> list[Tensor]:
        own = [p for p in parameters if id(p) not in seen]
        seen.update(map(id, own))
        return own

    found = [new(layers.parameters_before(boundary)) for boundary in layers.boundaries[:-1]]
    return [*found, new(model.parameters())]


def pieces_of(parameters: list[list[Tensor]], *, halves: bool) -> list[Piece]:
    """Return one piece for each layer, front first; with `halves`, of about half its size.

    A layer of a single tensor is one piece in any case.
    """
    pieces: list[Piece] = []
    for layer, own in enumerate(parameters):
        if not own:
            continue
        most = sum(p.numel() for p in own) / (2 if halves else 1)
        piece, size = Piece(layer), 0
        for parameter in own:
            if piece.parameters and size + parameter.numel() > most:
                pieces.append(piece)
                piece, size = Piece(layer), 0
            piece.parameters.append(parameter)
            size += parameter.numel()
        pieces.append(piece)
    return pieces
