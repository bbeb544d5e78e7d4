"""Finds a sequence for a chain and a limit: dynamic programs propose plans, a search improves them on exact bytes, and
the machine checks the result."""

from .plan_codes import keep_all as keep_all
from .solve import solve as solve
from .sweep import Row as Row
from .sweep import Sweep as Sweep
from .sweep import sweep as sweep
