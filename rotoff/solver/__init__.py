"""From a chain and a limit to a sequence: dynamic programs propose, a search on exact bytes improves, the machine
checks.
"""

from .plan_codes import keep_all as keep_all
from .solve import solve as solve
from .sweep import Row as Row
from .sweep import Sweep as Sweep
from .sweep import sweep as sweep
