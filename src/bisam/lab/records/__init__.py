"""One folder for each run: its configuration, a line of metrics for each epoch, its result, receipt and best weights.

`RunFolder` writes them, for one process at a time. `read` and `find_records` are for reports: they neither lock nor
write. To leave a run out of the tables, write the reason into its folder, as `not-counted.txt`.
In the files, numbers that JSON lacks are the strings "nan", "inf" and "-inf".
"""

from bisam.lab.records.folder import ConfigMismatch, RunFolder, check, check_result, config_differences
from bisam.lab.records.layout import CHECKPOINTS, CONFIG, PLAN, PREDICT, WEIGHTS, RecordError
from bisam.lab.records.lock import RunInUse
from bisam.lab.records.record import Record, find_records, read
from bisam.lab.records.result import fault_of
from bisam.lab.records.verify import copy_problems, lacks_weights, verify, weights_problems

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "PLAN",
    "PREDICT",
    "WEIGHTS",
    "ConfigMismatch",
    "Record",
    "RecordError",
    "RunFolder",
    "RunInUse",
    "check",
    "check_result",
    "config_differences",
    "copy_problems",
    "fault_of",
    "find_records",
    "lacks_weights",
    "read",
    "verify",
    "weights_problems",
]
