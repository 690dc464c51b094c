"""What a soak test has in every Python process of a server: it says how much memory is in use.

Whoever has this folder on PYTHONPATH and TOKENMILL_SOAK set looks into that folder. From the file
ask-0 on it counts what Python allocates, and for each ask-N it writes PID-N: the bytes, and where
there is a file named places, which lines of code have allocated them.
"""

import gc
import json
import os
import threading
import time
import tracemalloc

POLL_S = 0.1
LARGEST = 400  # places in the code, by bytes


def _places() -> dict[str, int]:
    found = tracemalloc.take_snapshot().statistics("lineno")
    return {str(each.traceback): each.size for each in found[:LARGEST]}


def _answer(folder: str) -> None:
    number = 0
    while True:
        time.sleep(POLL_S)
        if os.path.exists(f"{folder}/ask-{number}"):  # pathlib would intern what it looks for
            tracemalloc.start()  # without effect where it has begun
            gc.collect()
            told: dict[str, object] = {"bytes": tracemalloc.get_traced_memory()[0]}
            if os.path.exists(f"{folder}/places"):
                told["places"] = _places()
            name = f"{folder}/{os.getpid()}-{number}"
            with open(f"{name}.new", "w") as file:
                json.dump(told, file)
            os.rename(f"{name}.new", name)
            number += 1


if "TOKENMILL_SOAK" in os.environ:
    arguments = (os.environ["TOKENMILL_SOAK"],)
    threading.Thread(target=_answer, args=arguments, daemon=True).start()
