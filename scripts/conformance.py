"""Compare every language model class with stock, and record it for the Transformers that is installed.

``scripts/conformance.sh`` runs it in an environment for each release.
"""

from __future__ import annotations

import argparse
import sys

from loss_plugins.models.conformance import Evidence, results_of, write_results
from loss_plugins.models.conformance.processes import check_classes
from loss_plugins.models.conformance.releases import record_of, write_record
from loss_plugins.models.tiny import model_classes


def main() -> int:
    """1 if a class differs from stock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        write_results(found)
    print(write_record(record), record["statuses"], record["batches"])
    return int(bool(record["statuses"]["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
