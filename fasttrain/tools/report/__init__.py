"""One page about one run or several, that opens from disk: curves, events, checkpoints, settings. docs/report.md.

columns -> figures by step;  record -> all of a run;  content -> what the page says;  page -> HTML;  picture -> PNG
"""
