"""`python -m dilated_attention`."""

import sys

from dilated_attention.cli import main

sys.exit(main())
