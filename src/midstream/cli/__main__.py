"""`python -m midstream.cli` is `midstream`."""

import sys

from . import main

sys.exit(main())
