"""Harvests: activations of a data set, to shards that survive whatever happens to the run."""

from importlib.util import find_spec

from midstream.core.errors import MidstreamError

if find_spec("pyarrow") is None:
    raise MidstreamError("a harvest needs pyarrow; type: pip install 'midstream[harvest]'")

from .converting import from_hidden_states as from_hidden_states
from .inputs import Input as Input
from .manifest import Counts as Counts
from .manifest import OtherHarvestError as OtherHarvestError
from .pipeline import Progress as Progress
from .reading import Harvest as Harvest
from .reading import open as open
from .running import Report as Report
from .running import run as run
from .spec import HarvestSpec as HarvestSpec
