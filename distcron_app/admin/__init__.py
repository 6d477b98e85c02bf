"""The admin of distcron: schedules can be edited, history only read.

schedules   the list and the form of schedules
preview     what the form of a schedule would make happen
calendars   excluded days, by hand or from a file
actions     run now, pause, resume, each with a page that asks first
history     runs, nodes and audit entries
display     how states, instants and JSON are shown
"""

from distcron_app.admin.calendars import CalendarAdmin
from distcron_app.admin.history import AuditEntryAdmin, NodeAdmin, RunAdmin
from distcron_app.admin.schedules import ScheduleAdmin

__all__ = ["AuditEntryAdmin", "CalendarAdmin", "NodeAdmin", "RunAdmin", "ScheduleAdmin"]
