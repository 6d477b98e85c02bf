"""Routes of the pages; include them anywhere, all links are reversed."""

from django.urls import path, register_converter
from django.urls.converters import IntConverter

from distcron_app import views

app_name = "distcron"


class RowId(IntConverter):
    """An id that every database can compare; longer numbers are no page."""

    regex = "[0-9]{1,18}"


register_converter(RowId, "distcron_id")

urlpatterns = [
    path("", views.OverviewPage.as_view(), name="overview"),
    path("schedules/", views.SchedulesPage.as_view(), name="schedules"),
    path("schedules/<distcron_id:schedule_id>/", views.SchedulePage.as_view(), name="schedule"),
    path("schedules/<distcron_id:schedule_id>/run/", views.RunNow.as_view(), name="run_now"),
    path("schedules/<distcron_id:schedule_id>/pause/", views.PauseSchedule.as_view(), name="pause"),
    path(
        "schedules/<distcron_id:schedule_id>/resume/", views.ResumeSchedule.as_view(), name="resume"
    ),
    path(
        "schedules/<distcron_id:schedule_id>/explain/",
        views.ExplainPage.as_view(),
        name="explain",
    ),
    path(
        "schedules/<distcron_id:schedule_id>/backfill/",
        views.BackfillSchedule.as_view(),
        name="backfill_schedule",
    ),
    path(
        "schedules/<distcron_id:schedule_id>/backfills/",
        views.BackfillsPage.as_view(),
        name="backfills",
    ),
    path("backfills/<distcron_id:backfill_id>/", views.BackfillPage.as_view(), name="backfill"),
    path(
        "backfills/<distcron_id:backfill_id>/cancel/",
        views.CancelBackfill.as_view(),
        name="cancel_backfill",
    ),
    path("runs/", views.RunsPage.as_view(), name="runs"),
    path("runs/<distcron_id:run_id>/", views.RunPage.as_view(), name="run"),
    path("runs/<distcron_id:run_id>/cancel/", views.CancelRun.as_view(), name="cancel_run"),
    path("runs/<distcron_id:run_id>/again/", views.RunAgain.as_view(), name="run_again"),
    path("runs/<distcron_id:run_id>/output.txt", views.RunOutputFile.as_view(), name="run_output"),
    path("nodes/", views.NodesPage.as_view(), name="nodes"),
    path("locks/", views.LocksPage.as_view(), name="locks"),
    path("locks/release/", views.ReleaseLock.as_view(), name="release_lock"),
    path("live", views.live, name="live"),
    path("ready", views.ready, name="ready"),
]
