"""`python -m dure`, and `torchrun … -m dure`."""

import sys

from dure.cli.start import main

sys.exit(main())
