"""Planning: what a model and its cache take, what fits, and how fast decoding can be, before anything is loaded.

`plan` answers for one set of options, `compare` for several side by side, `request_cost` for one request.
"""

from kvine.evidence.plan.answer import Fits, Group, Plan, Walls
from kvine.evidence.plan.cost import Prices, RequestCost, request_cost
from kvine.evidence.plan.planner import plan
from kvine.evidence.plan.subject import Figures, Subject
from kvine.evidence.plan.variants import Variant, compare

__all__ = [
    "Figures",
    "Fits",
    "Group",
    "Plan",
    "Prices",
    "RequestCost",
    "Subject",
    "Variant",
    "Walls",
    "compare",
    "plan",
    "request_cost",
]
