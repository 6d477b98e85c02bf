"""Routes of the pages; include them anywhere, all links are reversed."""

from django.urls import path

from distcron_app import views

app_name = "distcron"

urlpatterns = [
    path("", views.OverviewPage.as_view(), name="overview"),
    path("schedules/", views.SchedulesPage.as_view(), name="schedules"),
    path("schedules/<int:schedule_id>/", views.SchedulePage.as_view(), name="schedule"),
    path("schedules/<int:schedule_id>/run/", views.RunNow.as_view(), name="run_now"),
    path("schedules/<int:schedule_id>/pause/", views.PauseSchedule.as_view(), name="pause"),
    path("schedules/<int:schedule_id>/resume/", views.ResumeSchedule.as_view(), name="resume"),
    path("runs/", views.RunsPage.as_view(), name="runs"),
    path("runs/<int:run_id>/", views.RunPage.as_view(), name="run"),
    path("runs/<int:run_id>/output.txt", views.RunOutputFile.as_view(), name="run_output"),
    path("nodes/", views.NodesPage.as_view(), name="nodes"),
    path("locks/", views.LocksPage.as_view(), name="locks"),
    path("live", views.live, name="live"),
    path("ready", views.ready, name="ready"),
]
