"""`python -m dure`, and `torchrun … -m dure`."""

import sys

from dure.cli.main import main

sys.exit(main())
