"""One process of the bench: `python -m equiport.bench.portbugs.worker OUT SEED NAME...`, a line of JSON a case."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import warnings
from typing import Any


def main() -> None:
    """Run each case; one that cannot be run is a line with its error."""
    from equiport.bench.portbugs.corpus import corpus, run_case

    out, seed, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    known = {operator.name: operator for operator in corpus()}
    for name in names:
        # what imports hold need not be looked at by every later collection
        gc.collect()
        gc.freeze()
        line: dict[str, Any]
        try:
            line = run_case(known[name], int(seed), with_common=True).model_dump(mode="json")
        except Exception as error:  # a case that breaks must not take the others with it
            where = traceback.extract_tb(error.__traceback__)[-1]
            line = {"operator": name, "error": f"{error!r} at {os.path.basename(where.filename)}:{where.lineno}"}
        with open(out, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
    # process groups of a serving stack may hang interpreter shutdown
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
