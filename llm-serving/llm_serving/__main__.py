"""`python -m llm_serving` is the console command `llm-serving`."""

import sys

from llm_serving.cli.main import main

sys.exit(main())
