"""`python -m fasttrain COMMAND`: the same as `fasttrain COMMAND`."""

import sys

from fasttrain.cli import main

sys.exit(main())
