"""What a run did and when: its stage records as figures, a picture and a page."""

from marlaas.timeline.runs import Run, read_run
from marlaas.timeline.utilisation import RunUse, TenantUse, utilisation

__all__ = ["Run", "RunUse", "TenantUse", "read_run", "utilisation"]
