"""The strategy of Lightning's Trainer."""

from lightning_gpp.strategy.bubbles import FillBubbles, ValidateInBubbles
from lightning_gpp.strategy.strategy import GPPStrategy

__all__ = ["FillBubbles", "GPPStrategy", "ValidateInBubbles"]
