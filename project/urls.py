"""Routes of the demo project."""

from django.contrib import admin
from django.contrib.auth import views as auth
from django.urls import include, path
from django.views import defaults
from django.views.generic import RedirectView

from distcron_app.views import live, ready, strict_headers

login = auth.LoginView.as_view(
    template_name="registration/login.html", redirect_authenticated_user=True
)

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="distcron:overview")),
    path("cron/", include("distcron_app.urls")),
    path("live", live),
    path("ready", ready),
    path("admin/", admin.site.urls),
    path("i18n/", include("django.conf.urls.i18n")),
    path("login/", strict_headers(login), name="login"),
    path("logout/", auth.LogoutView.as_view(), name="logout"),
]

handler403 = strict_headers(defaults.permission_denied)
handler404 = strict_headers(defaults.page_not_found)
handler500 = strict_headers(defaults.server_error)
