"""`python -m dure`, and `torchrun … -m dure`."""

import sys

from dure.cli import main

sys.exit(main())
