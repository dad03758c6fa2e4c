"""``python -m loss_plugins.models.conformance``: compare every class, and record it for the installed Transformers.

``scripts/conformance.sh`` runs it in an environment for each release.
"""

from __future__ import annotations

import argparse
import sys

from .check import Evidence
from .processes import check_classes
from .releases import record_of, write_record
from .results import RESULTS, results_of, write_results


def main() -> int:
    """1 if a class differs from stock."""
    from ..tiny import model_classes

    parser = argparse.ArgumentParser(prog="python -m loss_plugins.models.conformance", description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tests", default="", help="What the tests said, for the record.")
    parser.add_argument("--newest", action="store_true", help="Also write what `loss-plugins families` shows.")
    arguments = parser.parse_args()
    found: list[Evidence] = []
    names = list(model_classes())
    for evidence in check_classes(names, arguments.processes):
        found.append(evidence)
        print(f"{len(found)}/{len(names)} {evidence.name}: {evidence.status}", file=sys.stderr)
    record = record_of(results_of(found), arguments.tests)
    if arguments.newest:
        write_results(found, RESULTS)
    print(write_record(record), record["statuses"], record["batches"])
    return int(bool(record["statuses"]["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
