"""One page about one run or several, that opens from disk: curves, incidents, checkpoints, settings. docs/report.md.

    write_report([run], run / "report.html", running=True)     # during a run: never raises, reads what is new only

reading -> a Record of each run;  content -> what the page says of it, decimated;  page -> HTML;  picture -> PNG
"""

from fasttrain.tools.report.page import ReportRefresher, write_page, write_report
from fasttrain.tools.report.reading import Record, read_records

__all__ = ["Record", "ReportRefresher", "read_records", "write_page", "write_report"]
