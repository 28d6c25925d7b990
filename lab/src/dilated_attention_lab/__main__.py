"""`python -m dilated_attention_lab`."""

import sys

from dilated_attention_lab import main

if __name__ == "__main__":
    sys.exit(main())
