"""What a move saves and what it costs, in steps.

`schedule` sums the learning rate to come, `savings` weighs a move. Owns no hook; freezes nothing.
"""

from egeria_core.savings.savings import MoveCost, Savings
from egeria_core.savings.schedule import Schedule

__all__ = ["MoveCost", "Savings", "Schedule"]
