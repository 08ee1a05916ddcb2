import sys
from pathlib import Path

for folder in ("merging", "rendering"):  # for oracle, scripts and tiny_models: test folders are no packages
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
