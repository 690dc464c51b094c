"""These tests run only where a GPU is."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
