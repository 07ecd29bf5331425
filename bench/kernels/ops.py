"""The ops of the kernel benchmarks: those of fasttrain_kernels.testing.specs with sizes to measure."""

from __future__ import annotations

from fasttrain_kernels.testing.specs import SPECS

OPS = {spec.name: spec for spec in SPECS if spec.cpu or spec.gpu}
