"""What can make the promises untrue: each fact with its consequence and its fix.

One module per thing that is looked at. Each reads facts first and judges them by
functions without input or output, so that a judgement is tested with literal facts.
Nothing here changes anything, but for one lock with a TTL of a second in each Redis.

Finding codes are stable and listed in ``docs/doctor.md``.
"""

from distcron_app.diagnosis.finding import OK, PROBLEM, WARNING, Finding
from distcron_app.diagnosis.rounds import diagnose

__all__ = ["OK", "PROBLEM", "WARNING", "Finding", "diagnose"]
