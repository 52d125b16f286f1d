import sys

from llm_serving.cli.main import main

sys.exit(main())
