"""A plugin of pytest: ``-p tape_placed_swap`` runs tests of a `device_limit` with steps on tapes."""

import rotoff
from tape_placed_model import Placed

rotoff.Checkpointable = Placed
