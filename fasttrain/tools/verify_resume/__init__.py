"""Whether a run that is killed goes on as if it had not been: tried with the user's own settings, in real processes.

    whole    steps 1 to N at once
    killed   the same, but all its processes are killed once step k is saved; the same command goes on to N
    moved    from the whole run's checkpoint of step k to N, on another number of ranks
    calm     as moved, on as many ranks as the others; only where there is dropout

`killed` has to be `whole` bit by bit. `moved` adds up in another order: it has to see the same batches and to have the
losses of `whole` within rounding. Each rank draws its own dropout: `moved` goes without, and is compared with `calm`.
"""

from fasttrain.tools.verify_resume.certificate import certify
from fasttrain.tools.verify_resume.runs import RunFailed
from fasttrain.tools.verify_resume.trial import Trial, plan

__all__ = ["RunFailed", "Trial", "certify", "plan"]
