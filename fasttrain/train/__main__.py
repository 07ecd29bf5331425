"""`python -m fasttrain.train`."""

import sys

from fasttrain.train import main

sys.exit(main())
