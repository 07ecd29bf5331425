"""How a run is spread over ranks: runtime, parallelize, collectives, hang detector."""
